"""Watching a run of a forward: which memory from outside it reads and writes, by its operators.

`Watch` sees one run. Its `Trace` lists the operators of the run, so that two runs can be compared.

A kernel that is no operator of torch's is not seen, nor what a custom operator touches beside what
its schema says. What compiled code reads and writes by its own kernels is not seen either.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import attrgetter, eq, itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphrt.core.base import tree
from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.thread_mode import ThreadMode, unseen
from graphrt.core.capture.guard import in_eager_part
from graphrt.core.capture.operators import LIFT_FRESH, OperatorFacts, facts_of, written
from graphrt.core.capture.refusals import Source, user_source
from graphrt.core.replay.recording import active, in_task, issued, telling
from graphrt.trust.generators import WatchedGenerators
from graphrt.trust.places.slots import same_value
from graphrt.trust.watching.rows import ROWS, in_bounds, may_draw, overwrites
from graphrt.trust.watching.writes import Extent, SavedWrites, extent_of

T = TypeVar("T")

# The function of an `Op`, and the storage key of a `tree.Placed`.
_FUNC, _KEY, _FIRST = attrgetter("func"), itemgetter(1), itemgetter(0)


@dataclass(slots=True, eq=False)
class OwnMemory:
    """One storage that a run made."""

    ref: StorageWeakRef
    """As long as this is there, torch gives the storage's key to no other storage."""
    from_inputs: bool = False
    """Whether its values were computed from the step's inputs."""
    is_written: bool = False
    """Whether the run wrote it, after it was made."""
    data: Op | None = None
    """The operator that made it of Python data, if one did."""


class Use(OwnMemory):
    """Memory from outside of a forward that a run used: one storage."""

    is_table = False
    """Whether a warm-up has made it, without its inputs."""
    is_unsure = False
    """Whether operators hide if they do: a host's own one may keep some of what it writes, and an
    eager part looks its tensors up again at every replay."""

    def __init__(self, tensor: torch.Tensor, op: str, source: Source | None = None) -> None:
        storage = tensor.untyped_storage()
        super().__init__(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        # Where it begins and ends.
        self.span = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        # What the run filled before it read anything else: spans in bytes without gaps, and the
        # regions of tensors with gaps.
        self._filled: list[tuple[int, int]] = []
        self._filled_with_gaps: list[Extent] = []
        # Spans of which it read values that were there before.
        self._exposed: list[tuple[int, int]] = []
        self.writes: list[str] = []
        """The operators of the run that wrote it, in their order."""
        self.shape = (tensor.numel(),) if tensor.is_nested else tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.kinds = set[Hashable]()
        """The kinds of graphs whose warm-ups used it; empty if any graph may."""
        # The operator that used it first, and the line of code that issued that.
        self.op = op
        self.source = source or user_source()
        # Whether only eager parts have used it, none of which was given it as an argument: they
        # look it up again at every replay.
        self.in_parts = in_eager_part.get() is not None

    def note(self, part: torch.Tensor, facts: OperatorFacts, *, fills: bool) -> None:
        """An operator is given this `part` of the memory, which it `fills` or may read."""
        if self.in_parts:
            arguments = in_eager_part.get()
            self.in_parts = arguments is not None and self.ref.cdata not in arguments
        self.is_unsure |= in_eager_part.get() is not None or (fills and not facts.is_aten)
        if facts.is_view or not part.numel():
            return
        extent = extent_of(part)
        start, end, has_gaps, _ = extent
        if not fills:
            inside = any(first <= start and end <= last for first, last in self._filled)
            is_known = inside or extent in self._filled_with_gaps or (start, end) in self._exposed
            self._exposed += [] if is_known else [(start, end)]
        elif has_gaps:
            self._filled_with_gaps.append(extent)
        else:
            touching = [each for each in self._filled if each[0] <= end and start <= each[1]]
            apart = [each for each in self._filled if each not in touching]
            whole = min([start, *map(_FIRST, touching)]), max([end, *map(_KEY, touching)])
            self._filled = [*apart, whole]

    @property
    def exposed(self) -> bool:
        """Whether the run has read values that were there before it."""
        return bool(self._exposed)

    def exposes(self, start: int, end: int) -> bool:
        """Whether it has read such values between two bytes."""
        return any(first < end and start < last for first, last in self._exposed)

    @property
    def is_scratch(self) -> bool:
        """Whether the run has filled all that it read of it: values from before do not count."""
        is_filled = bool(self._filled or self._filled_with_gaps)
        return is_filled and not self.exposed and not self.is_unsure

    def __str__(self) -> str:
        line = "" if self.source is None else f", used at {self.source}"
        return f"{self.dtype} {self.shape}{line}"


class Deviation(Exception):
    """Raised in a run that follows an earlier one, in place of an operator that differs and may do
    harm; `in_part` says that this is an eager part's, as is the first that differs."""

    def __init__(self, op: str, *, in_part: bool) -> None:
        super().__init__(op)
        self.in_part = in_part


class Watch(ThreadMode):
    """A dispatch mode for one run: notes its operators (`trace`), and which memory from outside it
    reads and writes (`uses`). The step's `inputs`, by addresses of storages, are not outside.
    `saves` saves memory before it is written.

    With `follows`, the trace of an earlier run, operators are compared with that. From the first
    that differs on, `Deviation` is raised in place of one that could do harm: an operator of the
    host's own, or an index out of bounds.

    Of a run that is not `compared` with another one only writes and operators are noted: that takes
    half as long.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        inputs: frozenset[int] = frozenset(),
        saves: SavedWrites | None = None,
        follows: Trace | None = None,
        generators: WatchedGenerators | None = None,
        *,
        compared: bool = True,
        keeps_sources: bool = False,
        rows: tuple[int, int] | None = None,
        reads_arrays: bool = True,
    ) -> None:
        """`reads_arrays` says that graphs read the memory of NumPy arrays, as they do on the CPU.
        With `keeps_sources` each operator has its line of code. With `rows`, (all, live), each has
        the sum of the live rows of its result, if that has as many rows in all.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        # (all, live) rows of results whose sum is noted; None to note none.
        self._rows = rows
        # Writes to `inputs` memory, by the address of the tensor that was written.
        self.inputs_written: dict[int, Use] = {}
        # Whether an input was written, or reshaped in place.
        self.changes_inputs = False
        # Whether all that it wrote were rows whose numbers came from its inputs.
        self.writes_rows_of_inputs = True
        # Of the generators that operators were given, torch's address -> the generator.
        self.drawn: dict[int, torch.Generator] = {}
        # The first operator that differs from `follows`; None if none has so far.
        self._first_deviation: Op | None = None
        self._inputs = inputs
        self._saves = saves
        self._follows = follows
        self._generators = generators
        self._reads_arrays = reads_arrays
        self._keeps_sources = keeps_sources
        self.is_compared = compared
        # By the key of its storage, memory that the run made, and memory from outside: a `Use`, or
        # None where uses are not noted.
        self._memory: dict[int, OwnMemory | None] = {}

    def _note_drawn(self, arguments: Iterable[Any]) -> None:
        for given in arguments:
            if isinstance(given, torch.Generator):
                self.drawn[given._cdata] = given  # type: ignore[attr-defined]
                if self._generators is not None:
                    self._generators.note(given)

    def handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        facts, is_data = facts_of(func), func is LIFT_FRESH
        source = user_source() if is_data or self._keeps_sources else None
        op = Op(func, (), source, in_eager_part.get() is not None)
        if may_draw(func):
            self._note_drawn((*args, *kwargs.values()))
        targets = [*written(facts, args, kwargs)] if facts.writes else []
        if targets:
            self._before_writes(op, facts, args, targets)
        from_inputs = False
        # Keywords as (name, value): traces compare the names too.
        values = (*args, *kwargs.items())
        if is_data:
            op.arguments = (unseen(lambda: made_of_data(args[0])),)
        elif self.is_compared:
            from_inputs = self._use(op, facts, values, targets)
        else:
            # From outside, if no operator has made it.
            for _, key, _ in tree.placed(values, parts=True):
                if key is not None:
                    self._memory.setdefault(key, None)
        if not telling.get():
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

    def _note_written(self, targets: list[torch.Tensor], from_inputs: bool) -> None:
        """Note that an operator has written its `targets`, with values computed `from_inputs`."""
        for _, key, _ in tree.placed(targets, parts=True):
            memory = None if key is None else self._memory.get(key)
            if memory is not None:
                memory.is_written |= type(memory) is OwnMemory
                memory.from_inputs |= from_inputs

    def _note_made(self, op: Op, result: Any, from_inputs: bool) -> None:
        """Note the memory that an operator has made."""
        for part, key, address in tree.placed([result], parts=True):
            if key is None or address in self._inputs:
                continue
            storage = part.untyped_storage()
            if key not in self._memory:
                self._memory[key] = OwnMemory(StorageWeakRef(storage), from_inputs)  # type: ignore[no-untyped-call]
            made = self._memory[key]
            # Not baked in: an array's memory, where replays read that, and what a task makes, as
            # each replay makes it anew.
            is_baked = storage.resizable() or not self._reads_arrays
            if op.func is LIFT_FRESH and type(made) is OwnMemory and is_baked and not in_task.get():
                made.data = op

    @property
    def uses(self) -> dict[int, Use]:
        """The memory from outside that the run has used."""
        return {key: use for key, use in self._memory.items() if isinstance(use, Use)}

    def scratch_spans(self, result: Any = None) -> list[tuple[int, int]]:
        """Where memory is that may be elsewhere in the next run, as seen once the run has ended
        with `result`. It has filled such memory before it read it, or a kernel of compiled code has
        made it: no operator shows that, but it is gone by now, or the result's."""
        results = tree.storage_keys(result)
        return [
            use.span
            for key, use in self.uses.items()
            if use.ref.expired()  # type: ignore[no-untyped-call]
            or key in results
            or use.is_scratch
        ]

    def begin_part(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
        """An eager part begins. Note its plain arguments: replays give it those of the capture.
        Returns the keys of the memory that it is given."""
        tensors: list[torch.Tensor] = []
        for value in (*args, *kwargs.values()):
            for _, leaf in tree.leaves(value):
                is_tensor = isinstance(leaf, torch.Tensor)
                (tensors if is_tensor else self.trace.values_of_parts).append(leaf)
        return frozenset(map(_KEY, tree.placed(tensors, parts=True)))

    @property
    def deviation(self) -> str:
        """The first operator that differs from `follows`, and its line; "" if none does."""
        first = self._first_deviation
        return "" if first is None else f"{first} at {first.source or 'an unknown line'}"

    def made_alive(self) -> dict[int, OwnMemory]:
        """The memory that the run made and that is still alive."""
        made = [(key, memory) for key, memory in self._memory.items() if type(memory) is OwnMemory]
        return {key: memory for key, memory in made if not memory.ref.expired()}  # type: ignore[no-untyped-call]

    def written(self) -> dict[int, Use]:
        """The memory from outside that the run has written."""
        return {key: use for key, use in self.uses.items() if use.is_written}

    def _follow(self, op: Op, args: Sequence[Any], earlier: Trace) -> None:
        """Raise `Deviation` if the run differs from an earlier one, and this operator may do
        harm."""
        at = len(self.trace)
        first = self._first_deviation
        if first is None:
            if at < len(earlier) and earlier[at] == op:
                return
            op.source = op.source or user_source()
            first = self._first_deviation = op
        if not (facts_of(op.func).is_aten and unseen(lambda: in_bounds(op.func, args))):
            # A segment may differ first, and a collective in a part be the first to do harm.
            raise Deviation(str(op), in_part=first.in_part and op.in_part)

    def _before_writes(
        self, op: Op, facts: OperatorFacts, args: Sequence[Any], targets: list[torch.Tensor]
    ) -> None:
        """Note, and save, the memory that an operator is about to write."""
        for tensor, key, address in tree.placed(targets):
            use = None if key is None else self._memory.get(key)
            if key is None or type(use) is OwnMemory:
                continue
            if address in self._inputs:
                self.changes_inputs = True
                if torch.Tag.inplace_view not in op.func.tags:
                    use = Use(tensor, str(op.func), op.source)
                    self.inputs_written.setdefault(tensor.data_ptr(), use)
                continue
            if not isinstance(use, Use):
                use = self._memory[key] = Use(tensor, str(op.func), op.source)
            use.is_written = True
            use.writes.append(facts.name)
            self.writes_rows_of_inputs &= tensor is args[0] and self._are_of_inputs(facts, args)
            if self._saves is not None:
                self._saves.save(tensor, facts, args, use)

    def _are_of_inputs(self, facts: OperatorFacts, args: Sequence[Any]) -> bool:
        """Whether an operator writes rows, whose numbers were all computed from the inputs."""
        indices = tree.placed(args[1:3], parts=True) if facts.name in ROWS else []
        of_inputs = [
            address in self._inputs or getattr(self._memory.get(key or 0), "from_inputs", False)
            for index, key, address in indices
            if not index.is_floating_point() and index.dtype is not torch.bool
        ]
        return bool(of_inputs) and all(of_inputs)

    def _use(
        self, op: Op, facts: OperatorFacts, values: Sequence[Any], targets: list[torch.Tensor]
    ) -> bool:
        """Note which memory an operator uses of its arguments, `values`, of which it writes
        `targets`, and describe these in `op`. Returns whether any was computed from the inputs."""
        operands, memory = tree.placed(values), self._memory
        overwritten = _overwritten(targets, operands) if overwrites(op.func) else ()
        tensors: dict[int, Operand] = {}
        from_inputs = False
        # What it fills is noted last: `copy_` of a tensor's own memory reads that first.
        filled: list[tuple[Use, torch.Tensor]] = []
        for each in operands:
            whole, key, _ = each
            is_own = key is None or type(memory.get(key)) is OwnMemory
            tensors[id(whole)] = _operand(whole, is_own=is_own)
            parts = [each] if type(whole) in tree.BARE else tree.placed([whole], parts=True)
            for part, key, address in parts:
                if key is None:
                    continue
                if address in self._inputs:
                    from_inputs = True
                    continue
                noted = memory.get(key)
                if noted is None:
                    noted = memory[key] = Use(part, str(op.func), op.source)
                if isinstance(noted, Use) and id(whole) in overwritten:
                    filled.append((noted, part))
                elif isinstance(noted, Use):
                    noted.note(part, facts, fills=False)
                elif noted.data is not None:
                    noted.data.is_used = True
                from_inputs |= noted.from_inputs
        for use, part in filled:
            use.note(part, facts, fills=True)
        if not in_task.get():
            op.arguments = _described(values, tensors)
        return from_inputs


def _overwritten(targets: list[torch.Tensor], operands: list[tree.Placed]) -> Collection[int]:
    """The ids of the tensors that an operator fills and does not read."""
    filled = {id(each) for each in targets}
    if len(filled) > 1:
        return filled
    # torch.add(state, x, out=state) reads what it fills.
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


# Watches that see one thing each ------------------------------------------------------------------


class IssuedWatch(ThreadMode):
    """Notes the operators that a forward issues while it is captured, in their order: some forwards
    take another way then.

    Operators of segments and eager parts are noted by the `CaptureGuard`, in the list that it finds
    in `issued`: this mode would also see those that the platform issues. It sees what a forward of
    several graphs runs between them."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Any] = []
        """The overloads that were called so far."""

    @undoing
    def run(self, undo: Undo, function: Callable[[], T], *, in_one: bool) -> T:
        """Call `function`, which captures; `in_one` says that it is one graph."""
        undo.set(issued, self.operators)
        return function() if in_one else self.around(function)

    def handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if active.get() is None:
            self.operators.append(func)
        return func(*args, **kwargs)


# What a run did, operator by operator, so that two runs can be compared ---------------------------

_PLAIN = (int, bool, str, type(None), torch.dtype)
"""Types of arguments that traces compare as they are; others they compare as text."""
_SHORT = 64
"""A tensor of Python data with at most so many values is described by them, a larger one by a sum
of its bytes."""


@dataclass(slots=True)
class Op:
    """One operator of a run. Two are equal if overloads and arguments are; values in tensors do not
    count. Operators of tasks have no arguments here, as each step updates them."""

    func: Any
    """The overload that was called."""
    arguments: tuple[object, ...] = ()
    """As `_described` gives them; of Python data a description of the values."""
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
    """The strides, or without an address the dtype."""

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
        """Whether captures of two runs would be equal: in operators, with `has_parts` without those
        of eager parts, and in the plain values that eager parts are given. If results differ all
        the same, an eager part has returned something else, as one does that reads a clock."""
        values, others = self.values_of_parts, other.values_of_parts
        same_values = len(values) == len(others) and all(map(same_value, values, others))
        ours, theirs = (each.captured(has_parts=has_parts) for each in (self, other))
        return same_values and ours == theirs

    def overloads(self) -> list[Any]:
        """The operators, without what they are given."""
        return [*map(_FUNC, self)]

    def captured(self, *, has_parts: bool) -> Trace:
        """The operators that a graph has captured: one that `has_parts` without those of eager
        parts, a single graph all of them."""
        return Trace([op for op in self if not op.in_part]) if has_parts else self

    def described(self, *, with_addresses: bool, scratch: Collection[tuple[int, int]]) -> Trace:
        """The operators without the values of Python data, and without the addresses of memory from
        outside unless `with_addresses`. Tensors in `scratch` memory, by its spans, count as one."""
        trace = Trace()
        for op in self:
            arguments = () if op.func is LIFT_FRESH else op.arguments
            if scratch:
                arguments = _without_scratch(arguments, scratch)
            if not with_addresses:
                arguments = _without_addresses(arguments)
            trace.append(Op(op.func, arguments, op.source))
        return trace

    def at_source(self, first: tuple[int, str] | None) -> str:
        """The words of a `first_difference`, with the line of code of its operator; "" for None."""
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
            # Or only one of them is NaN, of which no comparison is true.
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
            # As text: NaN is not equal to itself, and 0.0 is equal to -0.0.
            # Each call gets a generator in another Python object.
            if isinstance(value, torch.Generator):
                value = f"generator {value._cdata:#x}"  # type: ignore[attr-defined]
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
    """A description of the values of a tensor that was made of Python data."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        return _operand(tensor, is_own=True)
    if tensor.numel() <= _SHORT:
        return repr(tensor.tolist())
    on_host = tensor.detach().to("cpu").contiguous()
    data = ctypes.string_at(on_host.data_ptr(), on_host.nbytes)
    return f"{tuple(tensor.shape)} values, CRC {zlib.crc32(data):08x}"


def first_difference(
    now: Sequence[Any], then: Sequence[Any], same: Callable[[Any, Any], bool] = eq
) -> tuple[int, str] | None:
    """The position, and a description, of the first operator of a run that differs from a graph's;
    None if all are the `same`. Both are traces, or lists of overloads."""
    return next(differences(now, then, same), None)


def differences(
    now: Sequence[Any], then: Sequence[Any], same: Callable[[Any, Any], bool]
) -> Iterator[tuple[int, str]]:
    """`first_difference` and all after it."""
    for at, (ours, theirs) in enumerate(zip_longest(now, then)):
        if ours is None or theirs is None:
            yield at, f"{ours or 'none'} where the graph has {theirs or 'none'}"
        elif not same(ours, theirs):
            yield at, f"{ours}{_words(ours, theirs)}"


def same_but_for_size(ours: Op, theirs: Op) -> bool:
    """Whether two operators are the same but for what a graph's size may change: shapes of tensors,
    Python data in them, and whole numbers. Floats, texts and addresses have to be equal."""
    if ours.func is not theirs.func:
        return False
    return ours.func is LIFT_FRESH or _same_but_size(ours.arguments, theirs.arguments)


def _without_addresses(value: Any) -> Any:
    """Tensors from outside by shape and stride alone."""
    if isinstance(value, Operand):
        return value if value.address is None else value._replace(address=0)
    return tuple(map(_without_addresses, value)) if type(value) is tuple else value


def _without_scratch(value: Any, spans: Collection[tuple[int, int]]) -> Any:
    """Arguments with a word in place of each tensor that begins in one of the spans."""
    if isinstance(value, Operand):
        at = value.address
        is_scratch = at is not None and any(first <= at < end for first, end in spans)
        return "scratch memory" if is_scratch else value
    return tuple(_without_scratch(each, spans) for each in value) if type(value) is tuple else value


def _words(ours: Any, theirs: Any) -> str:
    """How an operator differs from the graph's: another operator, or its first other argument; one
    that another size does not explain goes first."""
    if not isinstance(theirs, Op) or ours.func is not theirs.func:
        return f" where the graph has {theirs}"
    pairs = [*zip_longest(ours.arguments, theirs.arguments)]
    differing = [pair for pair in pairs if not _same_but_size(*pair)]
    differing += [pair for pair in pairs if pair[0] != pair[1]]
    mine, other = (str(each)[:80] for each in differing[0])
    return f": {mine} where the graph has {other}"


def _same_but_size(ours: Any, theirs: Any) -> bool:
    """`same_but_for_size`, of two arguments."""
    if isinstance(ours, Operand) and isinstance(theirs, Operand):
        return ours.address == theirs.address
    if type(ours) is int:
        return type(theirs) is int
    if type(ours) is tuple and type(theirs) is tuple:
        return len(ours) == len(theirs) and all(map(_same_but_size, ours, theirs))
    return bool(ours == theirs)
