"""Watching a run of a forward: what memory from outside it reads and writes, operator by operator.

A kernel that is no operator of torch's is not seen, nor what a custom operator touches beside what
its schema says. What compiled code reads and writes by its own kernels is not seen either.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphrt.core.base.thread_mode import ThreadMode, is_taken_apart, unseen
from graphrt.core.base.torch_names import storage_of_weak
from graphrt.core.capture.guard import in_eager_part
from graphrt.core.capture.source import Source, user_source
from graphrt.core.replay.recording import in_task
from graphrt.core.trust.generators import Generators
from graphrt.core.trust.watching.draws import draws_numbers
from graphrt.core.trust.watching.operators import facts_of, in_bounds, written
from graphrt.core.trust.watching.trace import Op, Trace, arguments_of, made_of_data
from graphrt.core.trust.watching.writes import SavedWrites

LIFT_FRESH = torch.ops.aten.lift_fresh.default
"""What every tensor made from Python data, or from a NumPy array, goes through."""


class Use:
    """Memory from outside of a forward that a run used: one storage."""

    __slots__ = (
        "dtype",
        "exposed",
        "in_parts",
        "is_written",
        "op",
        "overwritten",
        "ref",
        "shape",
        "source",
        "stride",
    )

    def __init__(self, ref: StorageWeakRef, tensor: torch.Tensor, op: str) -> None:
        self.ref = ref
        self.shape = tuple(tensor.shape)
        self.stride = (tensor.storage_offset(), *tensor.stride())
        self.dtype = tensor.dtype
        self.op = op
        self.source: Source | None = user_source()
        self.is_written = False
        # Whether the run has read what was there before it; how many elements it wrote at first.
        self.exposed = False
        # Whether eager parts alone have used it, which find at every replay what is there then.
        self.in_parts = _finds_itself(ref.cdata)
        self.overwritten = 0

    @classmethod
    def of(cls, tensor: torch.Tensor, op: str) -> Use:
        """The use of a plain tensor by `op`."""
        return cls(_weak(tensor), tensor, op)

    def storage(self) -> torch.UntypedStorage | None:
        """The memory, if it is still there."""
        if self.ref.expired():  # type: ignore[no-untyped-call]
            return None
        return storage_of_weak(self.ref.cdata)

    def __str__(self) -> str:
        line = "" if self.source is None else f", used at {self.source}"
        return f"{self.dtype} {self.shape}{line}"


class Kept(NamedTuple):
    """Memory that a run made and that outlived it: whether it was computed from the inputs, and
    whether it was written again after it was made."""

    ref: StorageWeakRef
    from_inputs: bool
    rewritten: bool


class Deviation(Exception):
    """A run that was told what to do did something else, which was not done; `in_part` says that it
    was in an eager part."""

    def __init__(self, op: str, *, in_part: bool) -> None:
        super().__init__(op)
        self.in_part = in_part


class Watch(ThreadMode):
    """Sees what one run does with memory from outside; `own` is memory that is no news, by address
    of its storage. Writes are saved in `saves` before they are done.

    With `follows`, the trace of an earlier run, the first operator that differs from it is looked
    at: if it could do harm (an operator of the host's own, an index out of bounds) `Deviation` is
    raised before it is done.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        own: frozenset[int] = frozenset(),
        saves: SavedWrites | None = None,
        follows: Trace | None = None,
        generators: Generators | None = None,
        *,
        keeps_sources: bool = False,
        rows: tuple[int, int] | None = None,
        draw: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any] | None = None,
        reads_arrays: bool = True,
    ) -> None:
        """`reads_arrays` says that graphs read the memory of NumPy arrays, as they do on the CPU.
        With `rows`, (all, live), `sums` has a number for the live rows of each operator's result
        that has so many rows in all. `draw` calls the operators that may draw random numbers.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace: Trace = []
        self.uses: dict[int, Use] = {}
        # Writes to memory that is no news, by where they begin.
        self.own_written: dict[int, Use] = {}
        self.saw_compiled_code = False
        self.sources: dict[int, Source | None] = {}
        self.sums: list[torch.Tensor | None] = []
        # Of what was made of Python data and used by operators: its places in the trace. Those of
        # eager parts are made anew at every replay.
        self.constants: set[int] = set()
        self.constants_of_parts: set[int] = set()
        self.deviates = False
        self.deviation = ""
        self._own = own
        self._rows = rows
        self._saves = saves
        self._follows = follows
        self._generators = generators
        self._draw = draw
        self._reads_arrays = reads_arrays
        self._keeps_sources = keeps_sources
        # Weak references also keep a storage's name from being used again.
        self._born: dict[int, StorageWeakRef] = {}
        self._from_inputs: set[int] = set()
        self._rewritten: set[int] = set()
        self._of_data: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_taken_apart(func):
            return self.take_apart(func, args, kwargs)
        if func is LIFT_FRESH:
            self._note(Op(func, (unseen(lambda: made_of_data(args[0])),)), args)
            result = func(*args, **kwargs)
            self.sums.append(None)
            self._bear(args[0])
            self._bear(result)
            self._note_constant(result)
            return result
        if self._generators is not None:
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Generator):
                    self._generators.note(value)
        facts = facts_of(func)
        if facts.writes:
            self._before_writes(func, facts, args, kwargs)
        self._note(Op(func, arguments_of(args, kwargs, self._outside)), args)
        overwritten = {id(each) for each in self._overwritten(facts, args, kwargs)}
        if overwritten and facts.writes and len(overwritten) < 2:
            # torch.add(state, x, out=state) reads it too.
            given = [id(each) for each in _tensors(args, kwargs)]
            overwritten = {each for each in overwritten if given.count(each) == 1}
        from_inputs = False
        for tensor in _tensors(args, kwargs):
            from_inputs |= self._use(tensor, func, facts.is_view, id(tensor) in overwritten)
        if self._draw is not None and draws_numbers(func):
            result = self._draw(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if self._rows is not None:
            self.sums.append(_sum_of_rows(result, *self._rows))
        if facts.writes:
            for tensor in written(facts, args, kwargs):
                self._rewrite(tensor, from_inputs)
        if isinstance(result, torch.Tensor):
            self._bear(result, from_inputs)
        elif isinstance(result, list | tuple):
            for each in _tensors(result, {}):
                self._bear(each, from_inputs)
        return result

    def kept(self) -> dict[int, Kept]:
        """What the run made that is still there."""
        return {
            key: Kept(ref, key in self._from_inputs, key in self._rewritten)
            for key, ref in self._born.items()
            if not ref.expired()  # type: ignore[no-untyped-call]
        }

    def _note(self, op: Op, args: Sequence[Any]) -> None:
        if self._follows is not None:
            place = len(self.trace)
            if not self.deviates:
                then = self._follows
                self.deviates = place >= len(then) or then[place] != op
                if self.deviates:
                    self.deviation = f"{op} at {user_source() or 'an unknown line'}"
            if self.deviates:
                is_aten = facts_of(op.func).is_aten
                if not is_aten or not unseen(lambda: in_bounds(op.func, args)):
                    raise Deviation(str(op), in_part=in_eager_part.get() is not None)
        if self._keeps_sources:
            self.sources[len(self.trace)] = user_source()
        self.trace.append(op)

    def _note_constant(self, tensor: torch.Tensor) -> None:
        key, place = storage_key(tensor), len(self.trace) - 1
        # Memory of an array is read where it is, and a task makes its own anew at every replay.
        is_baked = tensor.untyped_storage().resizable() or not self._reads_arrays
        if key is not None and is_baked and not in_task.get():
            self._of_data[key] = place
            if in_eager_part.get() is not None:
                self.constants_of_parts.add(place)

    def _before_writes(self, func: Any, facts: Any, args: Any, kwargs: Any) -> None:
        for tensor in written(facts, args, kwargs):
            key = storage_key(tensor)
            if key is None or key in self._born:
                continue
            if self._is_own(tensor):
                if torch.Tag.inplace_view not in func.tags:
                    self.own_written.setdefault(tensor.data_ptr(), Use.of(tensor, str(func)))
                continue
            use = self.uses.get(key)
            if use is None:
                if _from_compiled_code():
                    # Kernels of compiled code write into memory that no operator has made.
                    self.saw_compiled_code = True
                    self._born[key] = _weak(tensor)
                    continue
                use = self.uses[key] = Use(_weak(tensor), tensor, str(func))
            use.is_written = True
            if self._saves is not None:
                self._saves.save(tensor, facts, args, kwargs, use)

    def _overwritten(self, facts: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
        return written(facts, args, kwargs) if facts.overwrites else iter(())

    def _use(self, tensor: torch.Tensor, func: Any, is_view: bool, overwritten: bool) -> bool:
        """Note that an operator uses a tensor; returns whether it was computed from the inputs."""
        from_inputs = False
        for part in _parts(tensor):
            key = storage_key(part)
            if key is None:
                continue
            if self._is_own(part):
                from_inputs = True
                continue
            from_inputs |= key in self._from_inputs
            if key in self._born:
                if key in self._of_data:
                    self.constants.add(self._of_data[key])
                continue
            use = self.uses.get(key)
            if use is None:
                use = self.uses[key] = Use(_weak(part), part, str(func))
            elif use.in_parts:
                use.in_parts = _finds_itself(key)
            if overwritten and not use.exposed:
                use.overwritten = max(use.overwritten, part.numel())
            elif not is_view and part.numel() > use.overwritten:
                use.exposed = True
        return from_inputs

    def _rewrite(self, tensor: torch.Tensor, from_inputs: bool) -> None:
        for part in _parts(tensor):
            key = storage_key(part)
            if key is not None:
                self._rewritten.add(key)
                if from_inputs:
                    self._from_inputs.add(key)

    def _bear(self, tensor: torch.Tensor, from_inputs: bool = False) -> None:
        for part in _parts(tensor):
            key = storage_key(part)
            news = key not in self._born and key not in self.uses
            if key is not None and news and not self._is_own(part):
                self._born[key] = _weak(part)
                if from_inputs:
                    self._from_inputs.add(key)

    def _outside(self, tensor: torch.Tensor) -> bool:
        key = storage_key(tensor)
        return key is not None and key not in self._born

    def _is_own(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._own


def _finds_itself(key: int) -> bool:
    """Whether memory is used by an eager part that was not given it."""
    given = in_eager_part.get()
    return given is not None and key not in given


def _sum_of_rows(result: Any, rows: int, live: int) -> torch.Tensor | None:
    """The sum over the first `live` of so many rows, without waiting for the device."""
    if not isinstance(result, torch.Tensor) or result.dim() == 0 or result.shape[0] != rows:
        return None
    if result.layout is not torch.strided or result.is_complex():
        return None
    return unseen(lambda: result.detach()[:live].to(torch.float64).abs().sum())


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value, {})


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor, or those that a subclass is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from _parts(getattr(tensor, name))


def storage_key(tensor: torch.Tensor) -> int | None:
    """What a tensor's memory is known by while it lives; None where it has none of its own."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    try:
        storage = tensor.untyped_storage()
        # A tracer's tensors have a storage, and no memory.
        if storage.device.type == "meta":
            return None
        storage.data_ptr()
    except (NotImplementedError, RuntimeError):
        return None
    key: int = storage._cdata
    return key


def _weak(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _from_compiled_code() -> bool:
    """Whether code that Inductor has written issued this operator."""
    frame = sys._getframe(2)
    for _ in range(12):
        if "empty_strided_cpu" in frame.f_globals and "async_compile" in frame.f_globals:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
