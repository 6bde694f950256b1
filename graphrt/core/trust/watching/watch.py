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
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import attrgetter, eq, itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphrt.core.base import tree
from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.thread_mode import ThreadMode, unseen
from graphrt.core.capture.guard import in_eager_part, is_listed
from graphrt.core.capture.operators import LIFT_FRESH, OperatorFacts, facts_of, in_bounds, written
from graphrt.core.capture.refusals import Source, user_source
from graphrt.core.device.contract import GraphWork
from graphrt.core.replay.recording import active, counted, in_task, issued
from graphrt.core.trust.places.slots import same_value
from graphrt.core.trust.snapshot import Generators
from graphrt.core.trust.watching.writes import SavedWrites

T = TypeVar("T")

_FUNC, _KEY = attrgetter("func"), itemgetter(1)


@dataclass(slots=True, eq=False)
class Kept:
    """Memory that a run made. The weak reference also keeps the storage's name from being used
    again."""

    ref: StorageWeakRef
    from_inputs: bool = False
    """Whether what is there by now was computed from the inputs."""
    is_written: bool = False
    """Whether the run wrote it, after it was made."""
    data: Op | None = None
    """What made it of Python data."""


class Use(Kept):
    """Memory from outside of a forward that a run used: one storage."""

    exposed = False
    """Whether the run has read values from before it."""
    overwritten = 0
    """How many elements the run wrote before it read any."""

    def __init__(self, tensor: torch.Tensor, op: str, source: Source | None = None) -> None:
        super().__init__(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
        self.writes: list[str] = []
        """The operators of the run that wrote it, in their order."""
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

    def __str__(self) -> str:
        line = "" if self.source is None else f", used at {self.source}"
        return f"{self.dtype} {self.shape}{line}"


class Deviation(Exception):
    """A run that was told what to do did something else, which was not done; `in_part` says that it
    was in an eager part."""

    def __init__(self, op: str, *, in_part: bool) -> None:
        super().__init__(op)
        self.in_part = in_part


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
        With `keeps_sources` each operator has its line of code. With `rows`, (all, live), each has
        a sum of the live rows of a result that has so many rows in all.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self._rows = rows
        # Writes to `inputs` memory, by the address of the tensor that was written.
        self.inputs_written: dict[int, Use] = {}
        self.saw_compiled_code = False
        self._deviating: Op | None = None
        self._inputs = inputs
        self._saves = saves
        self._follows = follows
        self._generators = generators
        self._reads_arrays = reads_arrays
        self._keeps_sources = keeps_sources
        self.is_compared = compared
        # What the run has made, and memory from outside: None where its uses are not noted.
        self._memory: dict[int, Kept | None] = {}

    def handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        facts, is_data = facts_of(func), func is LIFT_FRESH
        source = user_source() if is_data or self._keeps_sources else None
        op = Op(func, (), source, in_eager_part.get() is not None)
        if facts.may_draw and self._generators is not None:
            self._generators.note_given((*args, *kwargs.values()))
        targets = [*written(facts, args, kwargs)] if facts.writes else []
        if targets:
            self._before_writes(op, facts, args, targets)
        from_inputs = False
        values = (*args, *kwargs.items())
        if is_data:
            op.arguments = (unseen(lambda: made_of_data(args[0])),)
        elif self.is_compared:
            from_inputs = self._use(op, facts, values, targets)
        else:
            self._know(values)
        if self._follows is not None:
            self._follow(op, args, self._follows)
        self.trace.append(op)
        result = func(*args, **kwargs)
        if self._rows is not None and not is_data:
            op.total = _sum_of_live(result, *self._rows)
        if targets and self.is_compared:
            self._note_written(targets, from_inputs)
        if not facts.makes_no_memory:
            self._note_made(op, result, from_inputs)
        return result

    def _know(self, values: Sequence[Any]) -> None:
        """Of what an operator is given that no operator has made, note that it is from outside."""
        for _, key, _ in tree.placed(values, parts=True):
            if key is not None:
                self._memory.setdefault(key, None)

    def _note_written(self, targets: list[torch.Tensor], from_inputs: bool) -> None:
        for _, key, _ in tree.placed(targets, parts=True):
            known = None if key is None else self._memory.get(key)
            if known is not None:
                known.is_written |= type(known) is Kept
                known.from_inputs |= from_inputs

    def _note_made(self, op: Op, result: Any, from_inputs: bool) -> None:
        """Note the memory that an operator has made."""
        for part, key, address in tree.placed([result], parts=True):
            if key is None or address in self._inputs:
                continue
            storage = part.untyped_storage()
            if key not in self._memory:
                self._memory[key] = Kept(StorageWeakRef(storage), from_inputs)  # type: ignore[no-untyped-call]
            made = self._memory[key]
            # Memory of an array is read where it is, and a task makes its own anew at every replay.
            is_baked = storage.resizable() or not self._reads_arrays
            if op.func is LIFT_FRESH and type(made) is Kept and is_baked and not in_task.get():
                made.data = op

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
                is_tensor = isinstance(leaf, torch.Tensor)
                (tensors if is_tensor else self.trace.values_of_parts).append(leaf)
        return frozenset(map(_KEY, tree.placed(tensors, parts=True)))

    @property
    def deviation(self) -> str:
        """The first operator that `follows` has not, and where it was issued."""
        first = self._deviating
        return "" if first is None else f"{first} at {first.source or 'an unknown line'}"

    def kept(self) -> dict[int, Kept]:
        """What the run made that is still there."""
        made = [(key, kept) for key, kept in self._memory.items() if type(kept) is Kept]
        return {key: kept for key, kept in made if not kept.ref.expired()}  # type: ignore[no-untyped-call]

    def written(self) -> dict[int, Use]:
        """The memory from outside that the run has written."""
        return {key: use for key, use in self.uses.items() if use.is_written}

    def _follow(self, op: Op, args: Sequence[Any], then: Trace) -> None:
        """Raise `Deviation` where this run leaves the way of an earlier one and may do harm."""
        at = len(self.trace)
        first = self._deviating
        if first is None:
            if at < len(then) and then[at] == op:
                return
            op.source = op.source or user_source()
            first = self._deviating = op
        if not (facts_of(op.func).is_aten and unseen(lambda: in_bounds(op.func, args))):
            # A segment may have left the way, of which a collective in a part is the first harm.
            raise Deviation(str(op), in_part=first.in_part and op.in_part)

    def _before_writes(
        self, op: Op, facts: OperatorFacts, args: Sequence[Any], targets: list[torch.Tensor]
    ) -> None:
        """Save what an operator is about to write."""
        for tensor, key, address in tree.placed(targets):
            use = None if key is None else self._memory.get(key)
            if key is None or type(use) is Kept:
                continue
            if address in self._inputs:
                if torch.Tag.inplace_view not in op.func.tags:
                    use = Use(tensor, str(op.func), op.source)
                    self.inputs_written.setdefault(tensor.data_ptr(), use)
                continue
            if use is None and _from_compiled_code():
                # Kernels of compiled code write into memory that no operator has made.
                self.saw_compiled_code = True
                self._memory[key] = Kept(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
                continue
            if not isinstance(use, Use):
                use = self._memory[key] = Use(tensor, str(op.func), op.source)
            use.is_written = True
            use.writes.append(facts.name)
            if self._saves is not None:
                self._saves.save(tensor, facts, args, use)

    def _use(
        self, op: Op, facts: OperatorFacts, values: Sequence[Any], targets: list[torch.Tensor]
    ) -> bool:
        """Note what an operator, which writes `targets`, uses of the `values` that it is given, and
        describe these; returns whether some were computed from the inputs."""
        operands, memory = tree.placed(values), self._memory
        overwritten = _overwritten(targets, operands) if facts.overwrites else ()
        tensors: dict[int, Operand] = {}
        from_inputs = False
        for each in operands:
            whole, key, _ = each
            is_own = key is None or type(memory.get(key)) is Kept
            tensors[id(whole)] = _operand(whole, is_own=is_own)
            parts = [each] if type(whole) in tree.BARE else tree.placed([whole], parts=True)
            for part, key, address in parts:
                if key is None:
                    continue
                if address in self._inputs:
                    from_inputs = True
                    continue
                known = memory.get(key)
                if known is None:
                    known = memory[key] = Use(part, str(op.func), op.source)
                if isinstance(known, Use):
                    known.note(part, facts, fills=id(whole) in overwritten)
                elif known.data is not None:
                    known.data.is_used = True
                from_inputs |= known.from_inputs
        if not in_task.get():
            op.arguments = _described(values, tensors)
        return from_inputs


def _overwritten(targets: list[torch.Tensor], operands: list[tree.Placed]) -> Collection[int]:
    """What an operator fills without reading it, by `id`."""
    filled = {id(each) for each in targets}
    if len(filled) > 1:
        return filled
    # torch.add(state, x, out=state) reads it too.
    ids = [id(tensor) for tensor, *_ in operands]
    return {each for each in filled if ids.count(each) == 1}


def _sum_of_live(result: Any, rows: int, live: int) -> torch.Tensor | None:
    """The sum over the live rows of a result that has all rows, without waiting for the device."""
    if (
        not isinstance(result, torch.Tensor)
        or result.is_nested
        or result.shape[:1] != (rows,)
        or result.layout is not torch.strided
        or result.is_complex()
    ):
        return None
    return unseen(lambda: result.detach()[:live].to(torch.float64).abs().sum())


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

_PLAIN = (int, bool, str, type(None), torch.dtype)
_SHORT = 64
"""A tensor of Python data with at most so many values is described by them, a larger one by a sum
of its bytes."""


@dataclass(slots=True)
class Op:
    """One operator of a run. Two are equal by overload and arguments, tensors not by their values;
    those of tasks have no arguments, as each step updates them."""

    func: Any
    arguments: tuple[object, ...] = ()
    source: Source | None = field(default=None, compare=False)
    """The line that issued it; always known of Python data."""
    in_part: bool = field(default=False, compare=False)
    """Whether it is in an eager part, which every replay runs again."""
    is_used: bool = field(default=False, compare=False)
    """Whether the tensor was used that it made of Python data."""
    total: torch.Tensor | None = field(default=None, compare=False)
    """The sum over the live rows of its result."""

    def __str__(self) -> str:
        return str(self.func)


class Operand(NamedTuple):
    """A tensor among arguments: one from outside, which a graph finds at this address at every
    replay, with its strides; or, without an address, one that the run made, with its dtype."""

    address: int | None
    shape: tuple[int, ...]
    form: object

    def __str__(self) -> str:
        where = f"of {self.form}" if self.address is None else f"at {self.address:#x}"
        return f"a tensor {self.shape} {where}"


class Trace(list[Op]):
    """The operators of one run, in their order; and the plain values that eager parts were given,
    `values_of_parts`."""

    def __init__(self, ops: Iterable[Op] = ()) -> None:
        super().__init__(ops)
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
        return Trace([op for op in self if not op.in_part]) if has_parts else self

    def described(self, *, with_addresses: bool) -> Trace:
        """The operators without the values of Python data, and where memory from outside is by
        choice."""
        trace = Trace()
        for op in self:
            arguments = () if op.func is LIFT_FRESH else op.arguments
            if not with_addresses:
                arguments = _without_addresses(arguments)
            trace.append(Op(op.func, arguments, op.source))
        return trace

    def at_source(self, first: tuple[int, str] | None) -> str:
        """What was first at a place, with the line of code there; "" for None."""
        if first is None:
            return ""
        at, text = first
        source = self[at].source if at < len(self) else None
        return text if source is None else f"{text} at {source}"

    def first_mixed(self, alone: Trace, rounding: float) -> tuple[int, str] | None:
        """The first operator whose live rows are not what they are in a run without padding."""
        for at, (ours, theirs) in enumerate(zip_longest(self, alone)):
            if ours is None:
                return None
            if theirs is None or ours.func is not theirs.func:
                return at, str(ours)
            if ours.total is None or theirs.total is None:
                continue
            a, b = ours.total.item(), theirs.total.item()
            if abs(a - b) > rounding * max(abs(a), abs(b)) or (a != a) != (b != b):
                return at, str(ours)
        return None

    def first_other_data(self, then: Trace, *, has_parts: bool) -> tuple[str, str] | None:
        """The first Python data, now and `then`, that a tensor was made of and that differ; `then`
        is a run of the same size. Tensors that nobody used do not count, with `has_parts` nor do
        those of eager parts."""
        for at, (ours, theirs) in enumerate(zip(self, then, strict=False)):
            if ours.func is not theirs.func:
                return None
            if ours.func is not LIFT_FRESH or ours == theirs or (has_parts and ours.in_part):
                continue
            if ours.is_used or theirs.is_used:
                return self.at_source((at, str(ours.arguments[0]))), str(theirs.arguments[0])
        return None


def _described(values: Iterable[Any], tensors: Mapping[int, Operand]) -> tuple[object, ...]:
    """Arguments as two runs can compare them."""
    described: list[object] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            described.append(tensors[id(value)])
        elif isinstance(value, list | tuple):
            described.append(_described(value, tensors))
        else:
            # Of fractions too: nan is not equal to itself, and 0.0 is equal to -0.0.
            described.append(value if type(value) in _PLAIN else repr(value))
    return tuple(described)


def _operand(tensor: torch.Tensor, *, is_own: bool) -> Operand:
    """What describes a tensor; a nested one that is not jagged has no sizes, and counts by its
    elements."""
    strides: tuple[int, ...] = ()
    shape = (tensor.numel(),) if tensor.is_nested else tuple(tensor.shape)
    if is_own:
        return Operand(None, shape, tensor.dtype)
    if tensor.layout is torch.strided and not tensor.is_nested:
        strides = tensor.stride()
    return Operand(tensor.data_ptr(), shape, strides)


def made_of_data(tensor: torch.Tensor) -> object:
    """What describes a tensor that was made of Python data."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        return _operand(tensor, is_own=True)
    if tensor.numel() <= _SHORT:
        return repr(tensor.tolist())
    at_hand = tensor.detach().to("cpu").contiguous()
    data = ctypes.string_at(at_hand.data_ptr(), at_hand.nbytes)
    return f"{tuple(tensor.shape)} values, CRC {zlib.crc32(data):08x}"


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
    their shapes and data, and whole numbers. Fractions, texts, and where memory from outside is do
    not."""
    if ours.func is not theirs.func:
        return False
    return ours.func is LIFT_FRESH or _alike(ours.arguments, theirs.arguments)


def _without_addresses(value: Any) -> Any:
    """Tensors from outside by shape and stride alone."""
    if isinstance(value, Operand):
        return value if value.address is None else value._replace(address=0)
    return tuple(map(_without_addresses, value)) if type(value) is tuple else value


def _text(ours: Any, theirs: Any) -> str:
    if not isinstance(theirs, Op) or ours.func is not theirs.func:
        return f" where the graph has {theirs}"
    pairs = [*zip_longest(ours.arguments, theirs.arguments)]
    differing = [pair for pair in pairs if not _alike(*pair)]
    differing += [pair for pair in pairs if pair[0] != pair[1]]
    mine, other = (str(each)[:80] for each in differing[0])
    return f": {mine} where the graph has {other}"


def _alike(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Operand) and isinstance(theirs, Operand):
        return ours.address == theirs.address
    if type(ours) is int:
        return type(theirs) is int
    if type(ours) is tuple and type(theirs) is tuple:
        return len(ours) == len(theirs) and all(map(_alike, ours, theirs))
    return bool(ours == theirs)
