"""Watching a run of a forward: what memory from outside it reads and writes, operator by operator.

A kernel that is no operator of torch's is not seen, nor what a custom operator touches beside what
its schema says. What compiled code reads and writes by its own kernels is not seen either.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphrt.core.base.thread_mode import ThreadMode, is_taken_apart, unseen
from graphrt.core.base.torch_names import storage_of_weak
from graphrt.core.capture.guard import in_eager_part
from graphrt.core.capture.source import Source, user_source
from graphrt.core.replay.recording import in_task
from graphrt.core.trust.generators import Generators
from graphrt.core.trust.watching.draws import draws_numbers
from graphrt.core.trust.watching.operators import OperatorFacts, facts_of, in_bounds, written
from graphrt.core.trust.watching.trace import LIFT_FRESH, Op, Trace, arguments_of, made_of_data
from graphrt.core.trust.watching.writes import SavedWrites

_BARE = (torch.Tensor, torch.nn.Parameter)
_NOWHERE = (None, 0)


class Use:
    """Memory from outside of a forward that a run used: one storage."""

    def __init__(self, tensor: torch.Tensor, op: str) -> None:
        self.ref = _weak(tensor)
        self.shape = tuple(tensor.shape)
        self.stride = (tensor.storage_offset(), *tensor.stride())
        self.dtype = tensor.dtype
        self.op = op
        self.source: Source | None = user_source()
        self.is_written = False
        # Whether what is there by now was computed from the inputs.
        self.from_inputs = False
        # Whether the run has read what was there before it; how many elements it wrote at first.
        self.exposed = False
        # Whether eager parts alone have used it, which find at every replay what is there then.
        self.in_parts = _finds_itself(self.ref.cdata)
        self.overwritten = 0

    def storage(self) -> torch.UntypedStorage | None:
        """The memory, if it is still there."""
        if self.ref.expired():  # type: ignore[no-untyped-call]
            return None
        return storage_of_weak(self.ref.cdata)

    def __str__(self) -> str:
        line = "" if self.source is None else f", used at {self.source}"
        return f"{self.dtype} {self.shape}{line}"


class Kept:
    """Memory that a run made: whether it was computed from the inputs, whether it was written again
    after it was made, and where in the trace it was made of Python data.

    The weak reference also keeps the storage's name from being used again."""

    def __init__(self, tensor: torch.Tensor, from_inputs: bool = False) -> None:
        self.ref = _weak(tensor)
        self.from_inputs = from_inputs
        self.rewritten = False
        self.of_data: int | None = None


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
        With `rows`, (all, live), the trace has a sum of the live rows of each operator's result
        that has so many rows in all. `draw` calls the operators that may draw random numbers.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace(keeps_sources=keeps_sources)
        self.uses: dict[int, Use] = {}
        # Writes to memory that is no news, by where they begin.
        self.own_written: dict[int, Use] = {}
        self.saw_compiled_code = False
        self.deviation = ""
        """The first operator that `follows` has not, and where it was issued."""
        self._own = own
        self._rows = rows
        self._saves = saves
        self._follows = follows
        self._generators = generators
        self._draw = draw
        self._reads_arrays = reads_arrays
        self._born: dict[int, Kept] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_taken_apart(func):
            return self.take_apart(func, args, kwargs)
        if func is LIFT_FRESH:
            return self._lift(func, args, kwargs)
        facts, given = facts_of(func), _tensors((*args, *kwargs.values()))
        if self._generators is not None:
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Generator):
                    self._generators.note(value)
        if facts.writes:
            self._before_writes(func, facts, args, kwargs)
        places, outside = [], set()
        for tensor in given:
            place = _place_of(tensor)
            places.append(place)
            if place[0] is not None and place[0] not in self._born:
                outside.add(id(tensor))
        self._note(Op(func, arguments_of(args, kwargs, outside)), args)
        from_inputs = self._use(func, facts, args, kwargs, zip(given, places, strict=True))
        if self._draw is not None and draws_numbers(func):
            result = self._draw(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if self._rows is not None:
            self.trace.sums.append(_sum_of_rows(result, *self._rows))
        if facts.writes:
            self._rewrite(written(facts, args, kwargs), from_inputs)
        self._bear((result,), from_inputs)
        return result

    def kept(self) -> dict[int, Kept]:
        """What the run made that is still there."""
        born = self._born.items()
        return {key: each for key, each in born if not each.ref.expired()}  # type: ignore[no-untyped-call]

    def _lift(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A tensor is made of Python data."""
        self._note(Op(func, (unseen(lambda: made_of_data(args[0])),)), args)
        result = func(*args, **kwargs)
        trace, (key, _) = self.trace, _place_of(result)
        trace.sums.append(None)
        self._bear((args[0], result), False)
        # Memory of an array is read where it is, and a task makes its own anew at every replay.
        is_baked = result.untyped_storage().resizable() or not self._reads_arrays
        if key in self._born and is_baked and not in_task.get():
            self._born[key].of_data = len(trace) - 1
            if in_eager_part.get() is not None:
                trace.constants_of_parts.add(len(trace) - 1)
        return result

    def _note(self, op: Op, args: Sequence[Any]) -> None:
        if self._follows is not None:
            place, then = len(self.trace), self._follows
            if not self.deviation and (place >= len(then) or then[place] != op):
                self.deviation = f"{op} at {user_source() or 'an unknown line'}"
            if self.deviation and not (
                facts_of(op.func).is_aten and unseen(lambda: in_bounds(op.func, args))
            ):
                raise Deviation(str(op), in_part=in_eager_part.get() is not None)
        if self.trace.keeps_sources:
            self.trace.sources[len(self.trace)] = user_source()
        self.trace.append(op)

    def _before_writes(self, func: Any, facts: OperatorFacts, args: Any, kwargs: Any) -> None:
        for tensor in written(facts, args, kwargs):
            key, address = _place_of(tensor)
            if key is None or key in self._born:
                continue
            if address in self._own:
                if torch.Tag.inplace_view not in func.tags:
                    self.own_written.setdefault(tensor.data_ptr(), Use(tensor, str(func)))
                continue
            use = self.uses.get(key)
            if use is None:
                if _from_compiled_code():
                    # Kernels of compiled code write into memory that no operator has made.
                    self.saw_compiled_code = True
                    self._born[key] = Kept(tensor)
                    continue
                use = self.uses[key] = Use(tensor, str(func))
            use.is_written = True
            if self._saves is not None:
                self._saves.save(tensor, facts, args, kwargs, use)

    def _use(
        self,
        func: Any,
        facts: OperatorFacts,
        args: Any,
        kwargs: Any,
        given: Iterable[tuple[torch.Tensor, tuple[int | None, int]]],
    ) -> bool:
        """Note what an operator uses of what it is `given`, each tensor with its `_place_of`;
        returns whether some of it was computed from the inputs."""
        overwritten = _overwritten(facts, args, kwargs) if facts.overwrites else ()
        from_inputs = False
        for tensor, place in given:
            parts = [(tensor, place)]
            if type(tensor) not in _BARE:
                parts = [(part, _place_of(part)) for part in _parts(tensor)]
            for part, (key, address) in parts:
                if key is None:
                    continue
                known = self._born.get(key)
                if address in self._own:
                    from_inputs = True
                elif known is None:
                    fills = id(tensor) in overwritten
                    from_inputs |= self._use_outside(part, key, func, facts.is_view, fills)
                else:
                    from_inputs |= known.from_inputs
                    if known.of_data is not None:
                        self.trace.constants.add(known.of_data)
        return from_inputs

    def _use_outside(
        self, part: torch.Tensor, key: int, func: Any, is_view: bool, overwritten: bool
    ) -> bool:
        use = self.uses.get(key)
        if use is None:
            use = self.uses[key] = Use(part, str(func))
        elif use.in_parts:
            use.in_parts = _finds_itself(key)
        if overwritten and not use.exposed:
            use.overwritten = max(use.overwritten, part.numel())
        elif not is_view and part.numel() > use.overwritten:
            use.exposed = True
        return use.from_inputs

    def _rewrite(self, tensors: Iterable[torch.Tensor], from_inputs: bool) -> None:
        for part in (each for tensor in tensors for each in _parts(tensor)):
            key, _ = _place_of(part)
            known = None if key is None else self._born.get(key) or self.uses.get(key)
            if isinstance(known, Kept):
                known.rewritten = True
            if known is not None:
                known.from_inputs |= from_inputs

    def _bear(self, results: Sequence[Any], from_inputs: bool) -> None:
        for tensor in _tensors(results):
            for part in [tensor] if type(tensor) in _BARE else _parts(tensor):
                key, address = _place_of(part)
                news = key not in self._born and key not in self.uses
                if key is not None and news and address not in self._own:
                    self._born[key] = Kept(part, from_inputs)


def _overwritten(facts: OperatorFacts, args: Any, kwargs: Any) -> Collection[int]:
    """What an operator fills without reading it, by `id`."""
    found = {id(each) for each in written(facts, args, kwargs)}
    if len(found) > 1:
        return found
    # torch.add(state, x, out=state) reads it too.
    given = [*map(id, _tensors((*args, *kwargs.values())))]
    return {each for each in found if given.count(each) == 1}


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


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor, or those that a subclass is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    return [part for name in flatten()[0] for part in _parts(getattr(tensor, name))]


def storage_key(tensor: torch.Tensor) -> int | None:
    """What a tensor's memory is known by while it lives; None where it has none of its own."""
    return _place_of(tensor)[0]


def _place_of(tensor: torch.Tensor) -> tuple[int | None, int]:
    """`storage_key`, and the address of the storage."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return _NOWHERE
    try:
        storage = tensor.untyped_storage()
        # A tracer's tensors have a storage, and no memory.
        return _NOWHERE if storage.device.type == "meta" else (storage._cdata, storage.data_ptr())
    except (NotImplementedError, RuntimeError):
        return _NOWHERE


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
