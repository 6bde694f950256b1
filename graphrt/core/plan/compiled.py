"""Compiled modules of a forward, as far as a plan must know them before anything is captured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from graphrt.core.base import InvalidOptionError, items_of, shown
from graphrt.core.batch import GraphMode, PieceProvider
from graphrt.core.plan.resolution import ModeResolution

AUTO = "auto"


class CompiledFacts(Protocol):
    """What a compiled module means for the mode."""

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
    """What a saved plan knows of a compiled module that it was made for."""

    graphs: bool = True
    provides: PieceProvider | None = None
    whole_graph: bool = False


def compiled_in(value: Any) -> list[Any]:
    """The compiled modules that `value` is, or that it holds as a module; none for other functions.

    A module holds one where `graphrt.compile` put it: in itself, or in a module inside of it.
    """
    if _is_compiled(value):
        return [value]
    if not isinstance(value, torch.nn.Module):
        return []
    inner = (getattr(module, "_compiled_call_impl", None) for module in value.modules())
    return [each for each in inner if _is_compiled(each)]


def all_compiled(announced: Iterable[Any]) -> tuple[Any, ...]:
    """The compiled modules in `compiled=[...]`, each once; raises `InvalidOptionError` for a value
    that has none."""
    found: dict[int, Any] = {}
    for value in items_of("compiled", announced, "[graphrt.compile(module, ...)]"):
        modules = compiled_in(value)
        if not modules:
            raise InvalidOptionError(
                "a value in compiled= is no compiled module and has none",
                got=shown(value),
                expected="what graphrt.compile returned, or a module that was compiled in place",
                advice="compiled=[graphrt.compile(module, ...)]",
            )
        found.update((id(module), module) for module in modules)
    return tuple(found.values())


def provider_of(
    modules: Sequence[CompiledFacts], asked: PieceProvider | str | None
) -> tuple[PieceProvider | None, bool]:
    """What cuts a forward with these modules into pieces, and whether it must stay whole.

    "auto" stands for what the modules bring along, else for breakable capture. Raises
    `InvalidOptionError` for breakable capture of modules whose pieces are captured one by one.
    """
    if any(module.whole_graph for module in modules):
        return None, True
    brought = next((module.provides for module in modules if module.provides is not None), None)
    if asked == AUTO:
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


def without_graphs(modules: Sequence[CompiledFacts], resolution: ModeResolution) -> ModeResolution:
    """NONE instead, if a module was compiled with `graphs=False`."""
    if all(module.graphs for module in modules):
        return resolution
    why = "a module of the forward was compiled with graphs=False"
    return resolution.stepped("graphs-off", GraphMode.NONE, why)


def _is_compiled(value: Any) -> bool:
    # Of the class: objects that make up attributes when asked are none, and asking may do harm.
    return isinstance(value, SavedFacts) or all(hasattr(type(value), name) for name in _NAMES)
