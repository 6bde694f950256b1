"""Tensors that leave an eager part by a side door: made there, not returned, read by a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphrt.core.base import (
    SideDoorError,
    ThreadMode,
    dispatch_modes,
    is_taken_apart,
    tree,
)
from graphrt.core.capture.refusals.source import Source, user_source
from graphrt.core.capture.refusals.transforms import refuse_transform
from graphrt.core.replay import name_of

_LIFT_FRESH = torch.ops.aten.lift_fresh.default
"""What every tensor made from Python data, or from a NumPy array, goes through."""


class _Made(NamedTuple):
    """Which line of which eager part made a tensor, and in which capture (0: in a warm-up)."""

    part: str
    source: Source | None
    capture: int

    @property
    def line(self) -> tuple[str, Source | None]:
        return self.part, self.source


class _Read(NamedTuple):
    """How a graph came to read a tensor."""

    what: str
    op: str | None
    source: Source | None
    tensor: str


class SideDoors:
    """What eager parts made that outlived them, in the warm-ups and captures of one session.

    A graph that reads such a tensor reads at every replay the one that it was captured with, while
    the eager part makes another. A tensor of an earlier run is a place like any other (a workspace
    that the first run allocates, say), unless the same line makes another one in this capture.

    Storages are known by weak references, not by addresses, which are used again. Not seen is what
    no operator makes: results of compiled functions, and what a custom operator's own body keeps.
    """

    def __init__(self) -> None:
        # By the numbers of storages, which nothing else has while there is a weak reference.
        self._made: dict[int, tuple[StorageWeakRef, _Made]] = {}
        self._capture = 0
        self._reads: dict[tuple[str, Source | None], _Read] = {}

    def __bool__(self) -> bool:
        """Whether anything is left that a graph must not read."""
        return bool(self._made)

    def begin_capture(self) -> None:
        """A capture begins: what was made before is older than it."""
        self._capture += 1
        self._reads.clear()

    def watched(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hidden: Callable[[torch.Tensor], bool] | None = None,
        before: Callable[[Any, Any, Any], None] | None = None,
    ) -> Any:
        """Run an eager part, and see what it makes; those inside of it are part of it.

        `hidden` says of a tensor that a graph made it and that the part was not given it; to read
        one raises `SideDoorError`.
        """
        if any(isinstance(mode, _MakingWatch) and mode.doors is self for mode in dispatch_modes()):
            return function(*args, **kwargs)
        refuse_transform(function)
        given = _memory((args, kwargs))
        watch = _MakingWatch(self, name_of(function), hidden, before, given)
        outer = in_eager_part.get()
        try:
            in_eager_part.set(frozenset(given))
            # A torch.autocast that the forward has made earlier keeps casts of weights. They are
            # for one side alone: graph and part each make their own at a replay.
            torch.clear_autocast_cache()
            result = watch.around(partial(function, *args, **kwargs))
            torch.clear_autocast_cache()
            in_eager_part.set(outer)
            return result
        except BaseException:
            in_eager_part.set(outer)
            raise

    def settle(self) -> None:
        """An eager part is over, and what it returned is where it belongs: forget what is gone.

        Raises `SideDoorError` if it made anew what the graph has read.
        """
        self._made = {key: each for key, each in self._made.items() if not _is_gone(each[0])}
        if not self._reads:
            return
        for _, made in self._made.values():
            read = self._reads.get(made.line) if made.capture == self._capture else None
            if read is not None:
                _refuse(read, made, " anew at every step")

    def check(self, values: Any, what: str, op: object = None) -> None:
        """Raise `SideDoorError` if the open capture may not read a tensor of `values`."""
        if not self._made:
            return
        for tensor in tree.tensors(values):
            # Of an empty one nothing can be read.
            for storage in _storages(tensor) if tensor.numel() else ():
                found = self._made.get(storage._cdata)
                if found is not None:
                    described = f"{tensor.dtype} {tuple(tensor.shape)}"
                    operator = None if op is None else str(op)
                    self._note(_Read(what, operator, user_source(), described), found[1])

    def _note(self, read: _Read, made: _Made) -> None:
        if made.capture == self._capture:
            _refuse(read, made)
        self._reads.setdefault(made.line, read)
        for _, other in self._made.values():
            if other.capture == self._capture and other.line == made.line:
                _refuse(read, made, " anew at every step")

    def note_made(self, part: str, result: Any, given: Sequence[torch.Tensor]) -> None:
        """Note the tensors of what an operator returned that are not memory of those it was given:
        none, for one that makes tensors of Python data."""
        before: set[int] | None = None
        made: _Made | None = None
        for tensor in (result,) if type(result) is torch.Tensor else tree.tensors(result):
            for storage in _storages(tensor):
                key = storage._cdata
                if key in self._made:
                    continue
                if before is None:
                    # Only now: most operators in a part read what others there have made.
                    before = {own._cdata for each in given for own in _storages(each)}
                if key not in before:
                    made = made or _Made(part, user_source(), self._capture)
                    self._made[key] = StorageWeakRef(storage), made  # type: ignore[no-untyped-call]


class _MakingWatch(ThreadMode):
    """Sees the operators of an eager part."""

    supports_higher_order_operators = True

    def __init__(
        self,
        doors: SideDoors,
        part: str,
        hidden: Callable[[torch.Tensor], bool] | None,
        before: Callable[[Any, Any, Any], None] | None,
        given: dict[int, torch.UntypedStorage],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hidden = hidden
        self._before = before
        self.doors = doors
        self._part = part
        # What it may read without a look, held so that nothing else comes by its names meanwhile.
        self._given = given

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_taken_apart(func):
            return self.take_apart(func, args, kwargs)
        tensors: list[torch.Tensor] | None = None
        if self._hidden is not None:
            tensors = _tensors((*args, *kwargs.values()))
            for tensor in tensors:
                if not self._was_given(tensor) and any(map(self._hidden, _in_memory(tensor))):
                    _refuse_hidden(self._part, str(func), tensor)
        if self._before is not None:
            self._before(func, args, kwargs)
        result = func(*args, **kwargs)
        if not _makes_nothing(func):
            if func is _LIFT_FRESH:
                tensors = []
            elif tensors is None:
                tensors = _tensors((*args, *kwargs.values()))
            self.doors.note_made(self._part, result, tensors)
        return result

    def _was_given(self, tensor: torch.Tensor) -> bool:
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        return is_plain and tensor.untyped_storage()._cdata in self._given


in_eager_part: ContextVar[frozenset[int] | None] = ContextVar("graphrt_eager_part", default=None)
"""What names the memory that was given to the eager part that this thread runs, if it is watched:
replays give it the same."""

side_doors: ContextVar[SideDoors | None] = ContextVar("graphrt_side_doors", default=None)
"""Those of the session whose warm-ups and captures this thread runs, if some are in pieces."""


def _memory(given: Any) -> dict[int, torch.UntypedStorage]:
    """The memory of all tensors, by what names it."""
    found = [each for tensor in tree.tensors(given) for each in _in_memory(tensor)]
    storages = [each.untyped_storage() for each in found]
    return {storage._cdata: storage for storage in storages}


def _in_memory(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """A tensor, or those that a subclass is made of, as far as they have strided memory."""
    if type(tensor) is not torch.Tensor:
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:
            return [each for name in flatten()[0] for each in _in_memory(getattr(tensor, name))]
    return (tensor,) if tensor.layout is torch.strided else ()


# By number: an operator's hash is computed in Python. Held, so that none is used again.
_known_to_make: dict[int, tuple[Any, bool]] = {}


def _makes_nothing(func: Any) -> bool:
    """Whether an operator is one of torch's own whose results are all memory that it was given:
    what makes a view, or writes in place."""
    known = _known_to_make.get(id(func))
    if known is None:
        schema = getattr(func, "_schema", None)
        alone = (
            schema is not None
            and schema.name.startswith("aten::")
            # These put a storage that is no tensor, or Python data, into one.
            and schema.name not in ("aten::set_", "aten::lift_fresh")
            and all(each.alias_info is not None for each in schema.returns)
        )
        known = _known_to_make[id(func)] = func, alone
    return known[1]


def _tensors(given: Sequence[Any]) -> list[torch.Tensor]:
    """Every tensor of an operator's arguments, mostly tensors and numbers."""
    found: list[torch.Tensor] = []
    for each in given:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, list | tuple | dict):
            found += tree.tensors(each)
    return found


def _storages(tensor: torch.Tensor) -> Sequence[torch.UntypedStorage]:
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
        return (tensor.untyped_storage(),)
    return [each.untyped_storage() for each in _in_memory(tensor)]


def _is_gone(ref: StorageWeakRef) -> bool:
    gone: bool = ref.expired()  # type: ignore[no-untyped-call]
    return gone


def _refuse_hidden(part: str, op: str, tensor: torch.Tensor) -> NoReturn:
    source = user_source()
    raise SideDoorError(
        f"eager break {part} reads a tensor that the graph made and that it was not given: replays "
        "would find the one of the graph that was captured last",
        op=op,
        source=None if source is None else str(source),
        got=f"{tensor.dtype} {tuple(tensor.shape)}",
        expected="arguments of the eager part, or memory that no graph makes anew",
        advice="pass it as an argument of the eager part",
    )


def _refuse(read: _Read, made: _Made, how: str = "") -> NoReturn:
    raise SideDoorError(
        f"{read.what} a tensor that eager break {made.part} made{how} and did not return: replays "
        "would see the one of the capture",
        op=read.op,
        source=None if read.source is None else str(read.source),
        got=f"{read.tensor}, made at {made.source or 'an unknown line'}",
        expected="results of the eager part, or memory that was there before and is written there",
        advice="return it from the eager part and use the result, or make it once, before the "
        "capture, and write into it (copy_, out=)",
    )
