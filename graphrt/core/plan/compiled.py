"""Compiled parts of a forward, as far as a plan must know them before anything is captured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from graphrt.core.base import InvalidOptionError
from graphrt.core.batch import GraphMode, PieceProvider
from graphrt.core.plan.resolution import ModeResolution

AUTO = "auto"


class CompiledFacts(Protocol):
    """What a compiled part means for the mode."""

    @property
    def graphs(self) -> bool:
        """Whether its steps may be replayed from graphs at all."""

    @property
    def provides(self) -> PieceProvider | None:
        """What cuts it into pieces; None where nothing captures them."""

    @property
    def whole_graph(self) -> bool:
        """Whether it must stay one piece, so that nothing else may cut it either."""


_NAMES = ("graphs", "provides", "whole_graph")


@dataclass(frozen=True)
class SavedFacts:
    """What a saved plan knows of a compiled part that it was made for."""

    graphs: bool = True
    provides: PieceProvider | None = None
    whole_graph: bool = False


def compiled_in(value: Any) -> list[Any]:
    """The compiled parts that `value` is, or that it holds as a module; none for other functions.

    A module holds one where `graphrt.compile` put it: in itself, or in a module inside of it.
    """
    if _is_compiled(value):
        return [value]
    if not isinstance(value, torch.nn.Module):
        return []
    inner = (getattr(module, "_compiled_call_impl", None) for module in value.modules())
    return [each for each in inner if _is_compiled(each)]


def all_compiled(announced: Iterable[Any]) -> tuple[Any, ...]:
    """The compiled parts in `compiled=[...]`, each once; raises `InvalidOptionError` for a value
    that has none."""
    found: dict[int, Any] = {}
    for value in announced:
        parts = compiled_in(value)
        if not parts:
            raise InvalidOptionError(
                "a value in compiled= is no compiled part and has none",
                got=repr(value)[:200],
                expected="what graphrt.compile returned, or a module that was compiled in place",
                advice="compiled=[graphrt.compile(module, ...)]",
            )
        found.update((id(part), part) for part in parts)
    return tuple(found.values())


def provider_of(
    parts: Sequence[CompiledFacts], asked: PieceProvider | str | None
) -> tuple[PieceProvider | None, bool]:
    """What cuts a forward with these parts into pieces, and whether it must stay whole.

    "auto" stands for what the parts bring along, else for breakable capture. Raises
    `InvalidOptionError` for breakable capture of parts whose pieces are captured one by one.
    """
    if any(part.whole_graph for part in parts):
        return None, True
    brought = next((part.provides for part in parts if part.provides is not None), None)
    if isinstance(asked, str) and asked.strip().lower() == AUTO:
        return brought or PieceProvider.BREAKABLE, False
    provider = PieceProvider.parse(asked)
    if brought is not None and provider is PieceProvider.BREAKABLE:
        raise InvalidOptionError(
            "compiled pieces that are captured one by one cannot be captured again around them",
            got='pieces="breakable"',
            expected=f'pieces="{brought.value}"',
            advice='pieces="auto", or compile without pool= for breakable capture',
        )
    return provider, False


def without_graphs(parts: Sequence[CompiledFacts], resolution: ModeResolution) -> ModeResolution:
    """NONE instead, if a part was compiled with `graphs=False`."""
    if all(part.graphs for part in parts):
        return resolution
    why = "a part of the forward was compiled with graphs=False"
    return resolution.stepped("graphs-off", GraphMode.NONE, why)


def _is_compiled(value: Any) -> bool:
    # Of the class: objects that make up attributes when asked are none, and asking may do harm.
    return isinstance(value, SavedFacts) or all(hasattr(type(value), name) for name in _NAMES)
