"""Parts of a forward that compile themselves, and what they mean for a runner."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from types import FunctionType
from typing import Any, Protocol, TypeGuard

import torch

from graphrt.core.base.errors import InvalidOptionError, ModeNotSupportedError
from graphrt.core.batch.modes import GraphMode, PieceProvider
from graphrt.core.capture.wrapper import GraphWrapper, WrapperOptions
from graphrt.core.plan.resolution import ModeResolution, ResolutionStep
from graphrt.core.replay.pool import GraphPool

AUTO = "auto"
_DEPTH = 4
"""How many functions, containers and objects the search goes into, one in the other."""
_OBJECTS_DEPTH = 2
_MANY = 256
"""Containers that are longer are data."""


class Compilable(Protocol):
    """Part of a forward that compiles itself at its first call, and must not do so any later."""

    @property
    def compiled(self) -> bool: ...

    @property
    def graphs(self) -> bool:
        """Whether its steps may be replayed from graphs at all."""

    @property
    def pool(self) -> GraphPool | None:
        """Where its own pieces are captured; None where it captures nothing."""

    @property
    def provides(self) -> PieceProvider | None:
        """What cuts it into pieces; None where nothing captures them."""

    @property
    def whole_graph(self) -> bool:
        """Whether it must stay one piece, so that nothing else may cut it either."""

    def use_capture_sizes(self, sizes: Collection[int]) -> None:
        """Which numbers of tokens batches are padded to."""

    def use_wrapper_options(self, options: WrapperOptions) -> None:
        """How its pieces are captured, unless the host has said so itself."""

    def rebind_weights(self) -> None:
        """Weights may have moved since the last capture."""

    def moved_weights(self) -> Collection[str]:
        """Names of weights that are other tensors than those in use."""

    def seal(self) -> None: ...

    def unseal(self) -> None:
        """It may be compiled again; weights may move until its next call, which takes them over."""


_NAMES = tuple(name for name in vars(Compilable) if not name.startswith("_"))


def compilables(forward: Callable[..., Any]) -> list[Compilable]:
    """The parts of a forward that compile themselves, as far as they can be found: in modules, and
    in what functions, their closures, partial arguments, containers and objects refer to."""
    found: dict[int, Compilable] = {}
    seen: dict[int, Any] = {}
    todo: list[tuple[Any, int]] = [(forward, 0)]
    while todo:
        value, depth = todo.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if _is_compilable(value):
            found[id(value)] = value
        elif isinstance(value, torch.nn.Module):
            for module in value.modules():
                # Where torch keeps what a module's calls go through instead.
                inner = getattr(module, "_compiled_call_impl", None)
                if _is_compilable(inner):
                    found[id(inner)] = inner
                todo += [(each, depth + 1) for each in vars(module).values() if _leads_on(each)]
        elif depth < _DEPTH:
            todo += [(each, depth + 1) for each in _referred(value, depth)]
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


def pool_of(parts: Collection[Compilable], pool: GraphPool | None) -> GraphPool | None:
    """The pool of a runner with these parts: `pool`, or theirs if none was given.

    Raises `InvalidOptionError` for parts that capture somewhere else: nothing would know which of
    their results the next step overwrites.
    """
    for part in parts:
        if part.pool is not None and part.pool is not pool:
            if pool is not None:
                raise InvalidOptionError(
                    "a compiled part of the forward captures its pieces in another pool",
                    got=f"pool={pool!r}",
                    expected=f"{part.pool!r}, which it was compiled with",
                    advice="pass the same pool= to graphrt.compile and to GraphRunner",
                )
            pool = part.pool
    return pool


def without_graphs(
    parts: Collection[Compilable], resolution: ModeResolution, *, strict: bool
) -> ModeResolution:
    """NONE instead, if a part was compiled with `graphs=False`; raises if `strict`."""
    if resolution.mode is GraphMode.NONE or all(part.graphs for part in parts):
        return resolution
    why = "a part of the forward was compiled with graphs=False"
    if strict:
        raise ModeNotSupportedError(
            f"mode {resolution.mode.name} is not supported here: {why}",
            got=resolution.mode.name,
            expected="NONE",
            advice="compile it with graphs=True, or strict=False to step down",
        )
    step = ResolutionStep("graphs-off", resolution.mode, GraphMode.NONE, why)
    return replace(resolution, mode=GraphMode.NONE, steps=(*resolution.steps, step))


def _is_compilable(value: Any) -> TypeGuard[Compilable]:
    # Of the class: objects that make up attributes when asked are none, and asking may do harm.
    return all(hasattr(type(value), name) for name in _NAMES)


def _leads_on(value: Any) -> bool:
    """Whether there may be a part in an attribute of a module, which holds data above all."""
    return _is_compilable(value) or isinstance(
        value, FunctionType | functools.partial | GraphWrapper
    )


def _referred(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, GraphWrapper):
        yield value.unwrap()
    elif inspect.ismethod(value):
        yield value.__self__
        yield value.__func__
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, FunctionType):
        yield from _names_of(value)
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value if len(value) <= _MANY else ()
    elif isinstance(value, Mapping):
        yield from value.values() if type(value) is dict and len(value) <= _MANY else ()
    elif depth <= _OBJECTS_DEPTH and _is_hosts(value):
        yield from vars(value).values()


def _is_hosts(value: Any) -> bool:
    """Whether it is an object of the host's, such as an engine: others would lead everywhere."""
    if isinstance(value, type) or inspect.ismodule(value) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in ("torch", "graphrt", "builtins")


def _names_of(function: FunctionType) -> Iterator[Any]:
    """What a function refers to; an attribute is no global, although it has a name like one."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # a variable that is not assigned yet
    for instruction in dis.get_instructions(function.__code__):
        if instruction.opname == "LOAD_GLOBAL" and instruction.argval in function.__globals__:
            yield function.__globals__[instruction.argval]
