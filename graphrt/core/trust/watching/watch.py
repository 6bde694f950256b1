"""Watching a run of a forward: what memory from outside it reads and writes, operator by operator.

`Watch` sees one run; its `Trace` are the operators of that run, so that two runs can be compared.

A kernel that is no operator of torch's is not seen, nor what a custom operator touches beside what
its schema says. What compiled code reads and writes by its own kernels is not seen either.
"""

from __future__ import annotations

import ctypes
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from operator import eq, itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphrt.core.base import tree
from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.thread_mode import ThreadMode, unseen
from graphrt.core.base.torch_names import storage_of_weak
from graphrt.core.capture.guard import in_eager_part, is_listed
from graphrt.core.capture.operators import LIFT_FRESH, OperatorFacts, facts_of, in_bounds, written
from graphrt.core.capture.refusals import Source, user_source
from graphrt.core.device.contract import GraphWork
from graphrt.core.replay.recording import active, counted, in_task, issued
from graphrt.core.trust.places.slots import same_value
from graphrt.core.trust.snapshot import Generators
from graphrt.core.trust.watching.writes import SavedWrites

T = TypeVar("T")


class Use:
    """Memory from outside of a forward that a run used: one storage."""

    is_written = False
    from_inputs = False
    """Whether what is there by now was computed from the inputs."""
    exposed = False
    """Whether the run has read values from before it."""
    overwritten = 0
    """How many elements the run wrote before it read any."""

    def __init__(self, tensor: torch.Tensor, op: str, source: Source | None = None) -> None:
        self.writes: list[str] = []
        """The operators of the run that wrote it, in their order."""
        self.ref = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.shape = (tensor.numel(),) if tensor.is_nested else tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.op = op
        self.source = source or user_source()
        # Whether eager parts alone have used it, which find at every replay what is there then.
        self.in_parts = in_eager_part.get() is not None

    def note(self, part: torch.Tensor, facts: OperatorFacts, *, fills: bool) -> None:
        """An operator is given this `part` of the memory, which it `fills` or may read."""
        if self.in_parts:
            arguments = in_eager_part.get()
            self.in_parts = arguments is not None and self.ref.cdata not in arguments
        if fills and not self.exposed:
            self.overwritten = max(self.overwritten, part.numel())
        elif not facts.is_view and part.numel() > self.overwritten:
            self.exposed = True

    def storage(self) -> torch.UntypedStorage | None:
        """The memory, if it is still there."""
        if self.ref.expired():  # type: ignore[no-untyped-call]
            return None
        return storage_of_weak(self.ref.cdata)

    def __str__(self) -> str:
        line = "" if self.source is None else f", used at {self.source}"
        return f"{self.dtype} {self.shape}{line}"


@dataclass(slots=True)
class Kept:
    """Memory that a run made: whether it was computed from the inputs, whether it was written again
    after it was made, and where in the trace it was made of Python data.

    The weak reference also keeps the storage's name from being used again."""

    ref: StorageWeakRef
    from_inputs: bool = False
    rewritten: bool = False
    of_data: int | None = None


_FUNC, _KEY = itemgetter(0), itemgetter(1)


class Deviation(Exception):
    """A run that was told what to do did something else, which was not done; `in_part` says that it
    was in an eager part."""

    def __init__(self, op: str, *, in_part: bool) -> None:
        super().__init__(op)
        self.in_part = in_part


class _Call(NamedTuple):
    """One call of an operator, with the line that issued it, if it is kept."""

    func: Any
    facts: OperatorFacts
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    source: Source | None


class Watch(ThreadMode):
    """Sees what one run does with memory from outside. What the step brings along does not count:
    its `inputs`, by address of storages. Before memory is written, `saves` saves it.

    With `follows`, the trace of an earlier run, the first operator that differs from it is looked
    at: if it could do harm (an operator of the host's own, an index out of bounds) `Deviation` is
    raised before it is done.

    A run that is not `compared` with another one has only its writes and its operators noted: that
    takes half as long.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        inputs: frozenset[int] = frozenset(),
        saves: SavedWrites | None = None,
        follows: Trace | None = None,
        generators: Generators | None = None,
        *,
        compared: bool = True,
        keeps_sources: bool = False,
        rows: tuple[int, int] | None = None,
        reads_arrays: bool = True,
    ) -> None:
        """`reads_arrays` says that graphs read the memory of NumPy arrays, as they do on the CPU.
        With `rows`, (all, live), the trace has a sum of the live rows of each operator's result
        that has so many rows in all.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace(keeps_sources=keeps_sources, rows=rows)
        # Writes to `inputs` memory, by the address of the tensor that was written.
        self.inputs_written: dict[int, Use] = {}
        self.saw_compiled_code = False
        self.deviation = ""
        """The first operator that `follows` has not, and where it was issued."""
        self._deviates_in_part = False
        self._inputs = inputs
        self._saves = saves
        self._follows = follows
        self._generators = generators
        self._reads_arrays = reads_arrays
        self.is_compared = compared
        # What the run has made, and memory from outside: None where its uses are not noted.
        self._memory: dict[int, Kept | Use | None] = {}

    def handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        facts, trace, is_data = facts_of(func), self.trace, func is LIFT_FRESH
        source = user_source() if is_data or trace.keeps_sources else None
        call = _Call(func, facts, args, kwargs, source)
        targets = self._before_effects(call) if facts.writes or facts.may_draw else []
        arguments: tuple[object, ...] = ()
        from_inputs = False
        if is_data:
            arguments = (unseen(lambda: made_of_data(args[0])),)
        elif self.is_compared:
            arguments, from_inputs = self._use(call, targets)
        else:
            for _, key, _ in tree.placed((*args, *kwargs.values()), parts=True):
                if key is not None:
                    self._memory.setdefault(key, None)
        op = Op(func, arguments)
        if self._follows is not None:
            self._follow(op, args, self._follows)
        if in_eager_part.get() is not None:
            trace.in_parts.add(len(trace))
        trace.append(op)
        trace.sources.append(source)
        result = func(*args, **kwargs)
        if trace.rows is not None:
            trace.note_sum(None if is_data else result)
        if targets or not facts.makes_nothing:
            self._note_made(call, targets, result, from_inputs)
        return result

    def _note_made(
        self, call: _Call, targets: list[torch.Tensor], result: Any, from_inputs: bool
    ) -> None:
        """After an operator: note what it has written, and the memory that it has made."""
        if targets and self.is_compared:
            self._rewrite(targets, from_inputs)
        if call.facts.makes_nothing:
            return
        memory, inputs, is_data = self._memory, self._inputs, call.func is LIFT_FRESH
        made = (call.args[0], result) if is_data else (result,)
        for part, key, address in tree.placed(made, parts=True):
            if key is not None and key not in memory and address not in inputs:
                memory[key] = Kept(StorageWeakRef(part.untyped_storage()), from_inputs)  # type: ignore[no-untyped-call]
        if is_data:
            self._note_data(result)

    @property
    def uses(self) -> dict[int, Use]:
        """The memory from outside that the run has used."""
        return {key: use for key, use in self._memory.items() if isinstance(use, Use)}

    def begin_part(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
        """An eager part begins: note the plain values that it is given, which a replay has of its
        capture; returns the keys of the memory that it is given."""
        tensors: list[torch.Tensor] = []
        for value in (*args, *kwargs.values()):
            for _, leaf in tree.leaves(value):
                if isinstance(leaf, torch.Tensor):
                    tensors.append(leaf)
                else:
                    self.trace.values_of_parts.append(leaf)
        return frozenset(map(_KEY, tree.placed(tensors, parts=True)))

    def kept(self) -> dict[int, Kept]:
        """What the run made that is still there."""
        made = [(key, kept) for key, kept in self._memory.items() if isinstance(kept, Kept)]
        return {key: kept for key, kept in made if not kept.ref.expired()}  # type: ignore[no-untyped-call]

    def written(self) -> dict[int, Use]:
        """The memory from outside that the run has written."""
        return {key: use for key, use in self.uses.items() if use.is_written}

    def _note_data(self, made: torch.Tensor) -> None:
        """The last operator has made a tensor of Python data."""
        key, at = tree.storage_key(made), len(self.trace) - 1
        kept = None if key is None else self._memory.get(key)
        # Memory of an array is read where it is, and a task makes its own anew at every replay.
        is_baked = made.untyped_storage().resizable() or not self._reads_arrays
        if isinstance(kept, Kept) and is_baked and not in_task.get():
            kept.of_data = at

    def _follow(self, op: Op, args: Sequence[Any], then: Trace) -> None:
        """Raise `Deviation` where this run leaves the way of an earlier one and may do harm."""
        at = len(self.trace)
        if not self.deviation and (at >= len(then) or then[at] != op):
            self.deviation = f"{op} at {user_source() or 'an unknown line'}"
            self._deviates_in_part = in_eager_part.get() is not None
        if self.deviation and not (
            facts_of(op.func).is_aten and unseen(lambda: in_bounds(op.func, args))
        ):
            # A segment may have left the way, of which a collective in a part is the first harm.
            in_part = self._deviates_in_part and in_eager_part.get() is not None
            raise Deviation(str(op), in_part=in_part)

    def _before_effects(self, call: _Call) -> list[torch.Tensor]:
        """Before an operator: keep the generators that it draws from, and save what it writes;
        returns the latter."""
        if self._generators is not None and call.facts.may_draw:
            self._generators.note_given((*call.args, *call.kwargs.values()))
        targets = [*written(call.facts, call.args, call.kwargs)] if call.facts.writes else []
        for tensor, key, address in tree.placed(targets):
            use = None if key is None else self._memory.get(key)
            if key is None or isinstance(use, Kept):
                continue
            if address in self._inputs:
                if torch.Tag.inplace_view not in call.func.tags:
                    use = Use(tensor, str(call.func), call.source)
                    self.inputs_written.setdefault(tensor.data_ptr(), use)
                continue
            if use is None:
                if _from_compiled_code():
                    # Kernels of compiled code write into memory that no operator has made.
                    self.saw_compiled_code = True
                    self._memory[key] = Kept(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
                    continue
                use = self._memory[key] = Use(tensor, str(call.func), call.source)
            use.is_written = True
            use.writes.append(call.facts.name)
            if self._saves is not None:
                self._saves.save(tensor, call.facts, call.args, use)
        return targets

    def _use(self, call: _Call, targets: list[torch.Tensor]) -> tuple[tuple[object, ...], bool]:
        """Note what an operator, which writes `targets`, uses of what it is given; returns its
        arguments as traces have them, and whether some were computed from the inputs."""
        operands = tree.placed((*call.args, *call.kwargs.values()))
        if in_task.get():
            self.trace.in_tasks.add(len(self.trace))
        overwritten = _overwritten(targets, operands) if call.facts.overwrites else ()
        tensors: dict[int, object] = {}
        from_inputs = False
        for each in operands:
            whole, key, _ = each
            extent = _extent(whole)
            if key is None or isinstance(self._memory.get(key), Kept):
                tensors[id(whole)] = Of(extent[0], whole.dtype)
            else:
                tensors[id(whole)] = At(whole.data_ptr(), *extent)
            parts = [each] if type(whole) in tree.BARE else tree.placed([whole], parts=True)
            for part, key, address in parts:
                known = None if key is None else self._memory.get(key)
                if key is None:
                    continue
                if address in self._inputs:
                    from_inputs = True
                    continue
                if known is None:
                    known = self._memory[key] = Use(part, str(call.func), call.source)
                if isinstance(known, Use):
                    known.note(part, call.facts, fills=id(whole) in overwritten)
                elif known.of_data is not None:
                    self.trace.constants.add(known.of_data)
                from_inputs |= known.from_inputs
        return arguments_of(call.args, call.kwargs, tensors), from_inputs

    def _rewrite(self, targets: list[torch.Tensor], from_inputs: bool) -> None:
        for _, key, _ in tree.placed(targets, parts=True):
            known = None if key is None else self._memory.get(key)
            if isinstance(known, Kept):
                known.rewritten = True
            if known is not None:
                known.from_inputs |= from_inputs


def _overwritten(targets: list[torch.Tensor], operands: list[tree.Placed]) -> Collection[int]:
    """What an operator fills without reading it, by `id`."""
    filled = {id(each) for each in targets}
    if len(filled) > 1:
        return filled
    # torch.add(state, x, out=state) reads it too.
    ids = [id(tensor) for tensor, *_ in operands]
    return {each for each in filled if ids.count(each) == 1}


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


# Watches that see one thing each ------------------------------------------------------------------

_COLLECTIVES = ("c10d", "_c10d_functional")


class IssuedWatch(ThreadMode):
    """Notes the operators of a step that captures, in their order: some forwards take another way
    then. What graphs record, and their eager parts, is noted by their captures, which find the list
    in `issued`: a platform's own operators, which run below, are none of the forward's. As a mode
    it sees what runs between the graphs of a forward that has several."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Any] = []

    @undoing
    def run(self, undo: Undo, function: Callable[[], T], *, in_one: bool) -> T:
        """Call `function`, which captures; `in_one` says that all of it is one capture."""
        undo.set(issued, self.operators)
        return function() if in_one else self.around(function)

    def handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if active.get() is None:
            self.operators.append(func)
        return func(*args, **kwargs)


class WorkCount(ThreadMode):
    """Counts what an eager run issues, from which a platform knows what a graph of it will take:
    operators by the stream that is current; those in `breaks` count as breaks too. Kernels outside
    of torch's operators are not seen, nor a stream that only they use."""

    supports_higher_order_operators = True

    def __init__(self, stream_id: Callable[[], int], breaks: frozenset[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = GraphWork()
        self._stream_id = stream_id
        self._breaks = breaks

    @undoing
    def run(self, undo: Undo, function: Callable[[], T]) -> T:
        """Call `function`, which issues what is counted."""
        undo.set(counted, self.work)
        return self.around(function)

    def handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.work.collectives |= getattr(func, "namespace", "") in _COLLECTIVES
        if is_listed(func, self._breaks):
            self.work.breaks += 1
        if not facts_of(func).is_view:
            stream, operators = self._stream_id(), self.work.operators
            operators[stream] = operators.get(stream, 0) + 1
        return func(*args, **kwargs)


# What a run did, operator by operator, so that two runs can be compared ---------------------------

_COMPARED_AS_IS = (int, bool, str, type(None), torch.dtype)
_SHORT = 64
"""A tensor of Python data with at most so many values is described by them, a larger one by a sum
of its bytes."""


class Op(NamedTuple):
    """One operator: its overload, and what describes its arguments, tensors not by their values."""

    func: Any
    arguments: tuple[object, ...]

    def __str__(self) -> str:
        return str(self.func)


class At(NamedTuple):
    """A tensor from outside, which a graph finds at this address at every replay."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __str__(self) -> str:
        return f"a tensor {self.shape} at {self.address:#x}"


class Of(NamedTuple):
    """A tensor that the run itself made."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"a tensor {self.shape} of {self.dtype}"


class Values(NamedTuple):
    """A tensor that was made of Python data."""

    values: str

    def __str__(self) -> str:
        return self.values


class Trace(list[Op]):
    """The operators of one run, in their order; its attributes go by their places in it.

    - `sources`: the line that issued each operator, if `keeps_sources`.
    - `constants`: the operators that made a tensor of Python data, if that was used.
    - `in_parts`: the operators in eager parts, which every replay runs again.
    - `in_tasks`: those of tasks, whose arguments each step updates.
    - `values_of_parts`: the plain values that eager parts were given.
    - `sums`: the sum over the live rows of each result, if `rows` are given.
    """

    def __init__(
        self,
        ops: Iterable[Op] = (),
        *,
        keeps_sources: bool = False,
        rows: tuple[int, int] | None = None,
    ) -> None:
        """`rows` are all rows and the live ones, where sums are wanted."""
        super().__init__(ops)
        self.keeps_sources = keeps_sources
        self.rows = rows
        self.sources: list[Source | None] = []
        self.sums: list[torch.Tensor | None] = []
        self.constants: set[int] = set()
        self.in_parts: set[int] = set()
        self.in_tasks: set[int] = set()
        self.values_of_parts: list[Any] = []

    def same_captured(self, other: Trace, *, has_parts: bool) -> bool:
        """Whether what a replay has of its capture is the same in two runs: operators, with
        `has_parts` but for those of eager parts, and the plain values that these are given. Where
        results differ all the same, eager parts gave something else, as a clock does."""
        values, others = self.values_of_parts, other.values_of_parts
        same_values = len(values) == len(others) and all(map(same_value, values, others))
        ours, theirs = (each.captured(has_parts=has_parts) for each in (self, other))
        return same_values and ours == theirs

    def overloads(self) -> list[Any]:
        """The operators, without what they are given."""
        return [*map(_FUNC, self)]

    def captured(self, *, has_parts: bool) -> Trace:
        """The operators that a graph has captured: with `has_parts` not those of eager parts. A
        single graph has captured them too."""
        left = self.in_parts if has_parts else set()
        if not left and not self.in_tasks:
            return self
        kept = [at for at in range(len(self)) if at not in left]
        trace = Trace([Op(self[at].func, ()) if at in self.in_tasks else self[at] for at in kept])
        trace.sources = [self.sources[at] for at in kept]
        return trace

    def described(self, *, with_addresses: bool) -> Trace:
        """The operators without the values of Python data, and where memory from outside is by
        choice."""
        if with_addresses and LIFT_FRESH not in self.overloads():
            return self
        trace = Trace()
        for op in self:
            arguments = () if op.func is LIFT_FRESH else op.arguments
            trace.append(
                Op(op.func, arguments if with_addresses else _without_addresses(arguments))
            )
        trace.sources = self.sources
        return trace

    def note_sum(self, result: Any) -> None:
        """Note the sum over the live rows of a result that has all rows, without waiting for the
        device."""
        assert self.rows is not None
        rows, live = self.rows
        if (
            not isinstance(result, torch.Tensor)
            or result.is_nested
            or result.dim() == 0
            or result.shape[0] != rows
            or result.layout is not torch.strided
            or result.is_complex()
        ):
            self.sums.append(None)
        else:
            self.sums.append(unseen(lambda: result.detach()[:live].to(torch.float64).abs().sum()))

    def at_source(self, first: tuple[int, str] | None) -> str:
        """What was first at a place, with the line of code there; "" for None."""
        if first is None:
            return ""
        at, text = first
        source = self.sources[at] if at < len(self.sources) else None
        return text if source is None else f"{text} at {source}"

    def first_mixed(self, alone: Trace, rounding: float) -> tuple[int, str] | None:
        """The first operator whose live rows are not what they are in a run without padding."""
        end = len(self)
        if self.overloads() != alone.overloads():
            difference = first_difference(self, alone, same_but_for_size)
            end = end if difference is None else difference[0]
        for at, (ours, theirs) in enumerate(zip(self.sums[:end], alone.sums, strict=False)):
            if ours is None or theirs is None:
                continue
            a, b = ours.item(), theirs.item()
            if abs(a - b) > rounding * max(abs(a), abs(b)) or (a != a) != (b != b):
                end = at
                break
        return (end, str(self[end])) if end < len(self) else None

    def first_other_data(self, then: Trace, *, has_parts: bool) -> tuple[str, str] | None:
        """The first Python data, now and `then`, that a tensor was made of and that differ; `then`
        is a run of the same size. Tensors that nobody used do not count, with `has_parts` nor do
        those of eager parts."""
        for at, (ours, theirs) in enumerate(zip(self, then, strict=False)):
            if ours.func is not theirs.func:
                return None
            if ours.func is not LIFT_FRESH or ours.arguments == theirs.arguments:
                continue
            is_used = at in self.constants or at in then.constants
            if is_used and not (has_parts and at in self.in_parts):
                told = self if self.keeps_sources else then
                return told.at_source((at, str(ours.arguments[0]))), str(theirs.arguments[0])
        return None


def arguments_of(
    args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Mapping[int, object]
) -> tuple[Any, ...]:
    """The arguments of one operator as two runs can compare them; `tensors` are those among them,
    `At` or `Of`, by `id`."""
    described = []
    for each in (*args, *kwargs.items()):
        if type(each) in _COMPARED_AS_IS:
            described.append(each)
        else:
            described.append(tensors.get(id(each)) or _described(each, tensors))
    return tuple(described)


def _described(value: Any, tensors: Mapping[int, object]) -> object:
    if isinstance(value, torch.Tensor):
        return tensors[id(value)]
    if isinstance(value, list | tuple):
        return tuple(_described(each, tensors) for each in value)
    if isinstance(value, float | complex):
        return repr(value)  # nan is not equal to itself, and 0.0 is equal to -0.0
    return value if isinstance(value, _COMPARED_AS_IS) else repr(value)


def _extent(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes and strides of a tensor, without strides where it has none; a nested one that is
    not jagged has neither, and counts by its elements."""
    if tensor.layout is not torch.strided:
        return tuple(tensor.shape), ()
    return ((tensor.numel(),), (1,)) if tensor.is_nested else (tuple(tensor.shape), tensor.stride())


def made_of_data(tensor: torch.Tensor) -> object:
    """What describes a tensor that was made of Python data."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        return Of(tuple(tensor.shape), tensor.dtype)
    if tensor.numel() <= _SHORT:
        return Values(repr(tensor.tolist()))
    at_hand = tensor.detach().to("cpu").contiguous()
    data = ctypes.string_at(at_hand.data_ptr(), at_hand.numel() * at_hand.element_size())
    return Values(f"{tuple(tensor.shape)} values, CRC {zlib.crc32(data):08x}")


def first_difference(
    now: Sequence[Any], then: Sequence[Any], same: Callable[[Any, Any], bool] = eq
) -> tuple[int, str] | None:
    """The first operator that a run did otherwise than a graph's, as its place and in words; None
    where all are the `same`. Both are traces, or overloads alone."""
    return next(differences(now, then, same), None)


def differences(
    now: Sequence[Any], then: Sequence[Any], same: Callable[[Any, Any], bool]
) -> Iterator[tuple[int, str]]:
    """All of them."""
    for at, (ours, theirs) in enumerate(zip_longest(now, then)):
        if ours is None or theirs is None:
            yield at, f"{ours or 'none'} where the graph has {theirs or 'none'}"
        elif not same(ours, theirs):
            yield at, f"{ours}{_text(ours, theirs)}"


def same_but_for_size(ours: Op, theirs: Op) -> bool:
    """Whether two operators are the same but for what follows from the size of a graph: of tensors
    their shapes, and whole numbers. Fractions, texts, and where memory from outside is do not."""
    return ours.func is theirs.func and _alike(ours.arguments, theirs.arguments)


def _without_addresses(arguments: tuple[object, ...]) -> tuple[object, ...]:
    """Tensors from outside by shape and stride alone."""
    known: list[object] = []
    for each in arguments:
        bare = each[1:] if isinstance(each, At) else each
        known.append(_without_addresses(bare) if type(bare) is tuple else bare)
    return tuple(known)


def _text(ours: Any, theirs: Any) -> str:
    if not isinstance(theirs, Op) or ours.func is not theirs.func:
        return f" where the graph has {theirs}"
    pairs = [*zip_longest(ours.arguments, theirs.arguments)]
    differing = [pair for pair in pairs if not _alike(*pair)]
    differing += [pair for pair in pairs if pair[0] != pair[1]]
    mine, other = (str(each)[:80] for each in differing[0])
    return f": {mine} where the graph has {other}"


def _alike(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, At) and isinstance(theirs, At):
        return ours.address == theirs.address
    if isinstance(ours, Of | Values) or type(ours) is int:
        return type(ours) is type(theirs)
    if isinstance(ours, tuple) and isinstance(theirs, tuple) and not isinstance(ours, At):
        return len(ours) == len(theirs) and all(map(_alike, ours, theirs))
    return bool(ours == theirs)
