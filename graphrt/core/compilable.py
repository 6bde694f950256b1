"""Parts of a forward that compile themselves, and what they mean for a runner."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import torch

from graphrt.core.errors import InvalidOptionError
from graphrt.core.modes import PieceProvider
from graphrt.core.wrapper import GraphWrapper

AUTO = "auto"


@runtime_checkable
class Compilable(Protocol):
    """Part of a forward that compiles itself at its first call, and must not do so any later."""

    @property
    def compiled(self) -> bool: ...

    @property
    def provides(self) -> PieceProvider | None:
        """What cuts it into pieces; None where nothing captures them."""

    @property
    def whole_graph(self) -> bool:
        """Whether it must stay one piece, so that nothing else may cut it either."""

    def use_capture_sizes(self, sizes: Collection[int]) -> None:
        """Which numbers of tokens batches are padded to."""

    def rebind_weights(self) -> None:
        """Weights may have moved since the last capture."""

    def seal(self) -> None: ...

    def unseal(self) -> None: ...


def compilables(forward: Callable[..., Any]) -> list[Compilable]:
    """The parts of a forward that compile themselves, as far as they can be found: in a module, in
    a method of one, and in what a function refers to."""
    roots: list[Any] = [forward, getattr(forward, "__self__", None)]
    if inspect.isfunction(forward):
        # A variable that is not assigned yet cannot be asked for.
        with suppress(ValueError):
            names = inspect.getclosurevars(forward)
            roots += [*names.nonlocals.values(), *names.globals.values()]
    found: dict[int, Compilable] = {}
    for root in roots:
        if isinstance(root, GraphWrapper):
            root = root.unwrap()
        inside = root.modules() if isinstance(root, torch.nn.Module) else (root,)
        for each in inside:
            # Where torch keeps what a module's calls go through instead.
            part = getattr(each, "_compiled_call_impl", None) or each
            if not isinstance(part, type) and isinstance(part, Compilable):
                found[id(part)] = part
    return list(found.values())


def provider_of(
    parts: Collection[Compilable], asked: PieceProvider | str | None
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
