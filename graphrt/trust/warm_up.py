"""Watches the warm-ups of a capture session: finds what the forward reads, and what it writes,
which is put back after each run without being declared."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch

from graphrt.core.base import tree
from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.errors import (
    PythonStateError,
    RefusedOpError,
    StaleTensorWarning,
    warn_caller,
)
from graphrt.core.base.texts import listed
from graphrt.core.base.thread_mode import without_kept_casts
from graphrt.core.base.torch_names import compiled_frames
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.guard import SideDoors, side_doors
from graphrt.core.capture.operators import facts_of
from graphrt.core.replay.recording import drawn_from
from graphrt.core.runner.contract import Calls, RunWatch, Values
from graphrt.trust.places.slots import (
    CLASS_ATTRIBUTE,
    CONTENTS,
    ITEM,
    MEMORY,
    MISSING,
    Place,
)
from graphrt.trust.places.walk import LRU_CACHE, Keyed, Places, cached_results, with_keys
from graphrt.trust.reads import ReadSet
from graphrt.trust.snapshot import PythonState, StateSnapshot, is_plain, put_back
from graphrt.trust.watching.padding import PaddingRows
from graphrt.trust.watching.watch import IssuedWatch, OwnMemory, Trace, Watch
from graphrt.trust.watching.writes import SavedWrites, WriteWatch, note_operators

T = TypeVar("T")


class WarmedUp(NamedTuple):
    """The watched warm-up of one kind of graph, at its largest size: `tokens`, operators, and
    whether it `writes` memory from outside."""

    tokens: int
    trace: Trace
    writes: bool
    captured: dict[GraphMode, list[Any]]
    """By mode, the operators that a capture of that size issued."""
    scratch: Collection[tuple[int, int]] = ()
    """The spans of memory that may be elsewhere in each run."""


@dataclass
class MovedSlots:
    """The Python slots, by their paths, that the forward of a runner changes. A session goes on
    from what earlier ones have seen."""

    by_runs: set[str] = field(default_factory=set)
    """Those that several runs have changed, or an eager part."""
    by_captures: dict[Hashable, frozenset[str]] = field(default_factory=dict)
    """(mode, kind) -> those that each capture changes which a warm-up came before: every call
    does."""


@dataclass
class WatchedState(RunWatch):
    """The state of a forward during one capture session: what `state` declares, and, if `reads`
    is watched, what warm-ups write. A session calls `run` for each warm-up and `capture` for each
    graph, `restore` after either, and `settle` at its end.
    """

    state: StateSnapshot
    reads: ReadSet
    warmed_up: dict[Hashable, WarmedUp]
    moved: MovedSlots
    pad_rows: Sequence[int]
    """The padding values of index inputs: rows of these numbers may be written."""
    is_in_graphs: Callable[[torch.Tensor], bool]
    """Whether a tensor's memory is of a graph pool."""
    has_parts: bool
    """Whether graphs may have eager parts."""
    padding: PaddingRows
    """The rows that warm-ups, which have padding alone, are seen to write."""
    with_rows: Collection[str] = ()
    """The inputs that have a batch axis."""
    capture_executes: bool = True
    """Whether operators run while they are captured."""

    def __post_init__(self) -> None:
        # What the last run under a `WriteWatch` wrote, with the values before it. It is kept until
        # the next run: the capture of that size writes the same memory.
        self._writes_of_size = SavedWrites(self.state.memory.limit)
        # Which Python slots the runs of this session change; None until a run is watched.
        self._moves: _Moves | None = None
        # The kinds of which this session has watched a run.
        self._kinds: set[Hashable] = set()
        # Keys of the memory that every run writes, so that it is no table that the first run fills:
        # a kind's second watched run wrote it too, or was not needed.
        self._steady: set[int] = set()
        # Whether the capture under way, or the last one, is tried; what watches it, if any; and
        # the tensors that held state before it.
        self._is_tried = False
        self._tried: WriteWatch | None = None
        self._held_before = 0
        # Whether the last capture has recorded only, and run nothing.
        self._only_recorded = False

    @undoing
    def run(self, undo: Undo, kind: Hashable, tokens: int, inputs: Values, calls: Calls[T]) -> T:
        """Run a forward of so many tokens eagerly. The run is watched if it is the largest of its
        kind so far, or has no kind. Another run is made again, watched, if it changes Python values
        and writes memory that larger ones did not. `inputs` are what it reads, in the runner's
        buffers.

        Raises `StateTooLargeError` if it writes what can be neither saved nor left, and
        `RefusedOpError` if it writes an input that has no batch axis.
        """
        self._only_recorded = False
        if not self.reads.watched:
            return calls()()
        moves = self._moves or self._begin()
        moves.begin(self.reads)
        # Autocast would keep its cast of a weight, and the run would read that and not the weight.
        without_kept_casts(undo)
        largest = self.warmed_up.get(kind)
        # Each session has to save what a forward writes, so a kind that writes is watched anew.
        is_saved = largest is not None and (kind in self._kinds or not largest.writes)
        if largest is not None and largest.tokens >= tokens and is_saved:
            watch, compiled = self._write_watch(moves, tokens), compiled_frames()
            result = watch.around(calls())
            has_left = moves.holds_new(moves.of_each)
            moves.note()
            if not moves.has_moved or (watch.written <= self._steady and not has_left):
                if compiled_frames() == compiled:
                    return result
                # Dynamo guards on dispatch keys, and the watch has one: without it the capture
                # would compile again, which on a GPU waits for the device.
                self.restore()
                return calls()()
            # It may have filled a table for this size, once for all, or made state of its own.
            self.restore()
            moves.take_back()
        addresses = frozenset(each.untyped_storage().data_ptr() for each in inputs.values())
        run = partial(self._run_watched, moves, addresses, calls)
        result = self._watch(moves, kind, tokens, run)
        for name, view in inputs.items():
            if name not in self.with_rows:
                self._check_input(name, view)
        return result

    def _write_watch(self, moves: _Moves, tokens: int, *, records: bool = False) -> WriteWatch:
        """A watch for the next run of a size, which saves what that writes."""
        memory = self.state.memory
        self._writes_of_size.restore()
        self._writes_of_size = SavedWrites(memory.limit)
        return WriteWatch(moves.before, self._writes_of_size, memory, tokens, records=records)

    def _check_input(self, name: str, view: torch.Tensor) -> None:
        """Raise `RefusedOpError` if the last watched run has written an input without a batch axis:
        that is meant as state, and the next step's fill would overwrite it."""
        end = view.data_ptr() + view.nbytes
        for at, use in self._inputs_written.items():
            if view.data_ptr() <= at < end:
                raise RefusedOpError(
                    f"the forward writes input {name!r}, of which it has a copy in the runner's "
                    "buffers: what it writes is lost after the step",
                    op=use.op,
                    source=None if use.source is None else str(use.source),
                    got=f"{name!r} without a batch axis, shape {tuple(view.shape)}",
                    advice="write state, such as a KV cache, in place where the forward reaches it "
                    "as an attribute or in a closure; write a clone() of scratch memory",
                )

    def _begin(self) -> _Moves:
        """Before the session's first watched run: save what the forward reaches."""
        places = self.reads.places()
        self.state.reach(places)
        note_operators()
        before = {key for _, _, key in places.keyed}
        # Earlier sessions may have watched all kinds, so that this one would not find `remade`.
        moves = _Moves(
            self.state.python,
            before,
            self.is_in_graphs,
            {*self.reads.remade},
            _Namespaces(places),
            self.moved,
        )
        self._moves = moves
        self._steady |= self.reads.written
        return moves

    def _watch(
        self, moves: _Moves, kind: Hashable, tokens: int, run: Callable[[], tuple[Watch, T]]
    ) -> T:
        """Make watched runs, `run`: one, and more if it makes or writes memory. Notes what they
        read and write; returns the result of the last."""
        is_first = not self._kinds
        self._kinds.add(kind)
        reads, memory = self.reads, self.state.memory
        watch, result = run()
        again = watch
        # The first run may define operators that smaller sizes call. To look for them takes
        # milliseconds, and later runs define some only where they call what is not torch's own.
        if is_first or not all(facts_of(op.func).is_aten for op in watch.trace):
            note_operators()
        self._inputs_written = watch.inputs_written
        made = moves.note_made(watch, reads)
        if made or watch.written():
            left = memory.take()
            self.padding.note_warm_up(memory)
            self.restore()
        # A second run shows what the first has done once for all. That is seen by what it left in
        # Python; or it is a table, of which it has not written just the rows of this step.
        if made or (watch.written() and (moves.has_moved or not watch.writes_rows_of_inputs)):
            # Run again on what the first run left: a table of indices that it filled may have held
            # anything before.
            memory.restore(left)
            again, result = run()
            moves.of_each |= moves.paths
            reads.note(again, kind, result)
            padding = _filled_once(made, watch, again, run, reads)
            if padding is not None:
                self.state.python.restore()
                # Else the next session, as of `capture_next`, finds state that is there before it.
                moves.namespaces.take_back()
                raise PythonStateError(
                    "the first call of the forward made or filled memory, and later calls read it; "
                    "a capture runs on padding, so its graph would start from wrong state",
                    got=padding,
                    expected="state that is made and filled before capture()",
                    advice=_advice_on(padding),
                )
        self._steady |= again.written().keys()
        reads.note(watch, kind, result)
        # Not the trace of the first run: that made tables, which graphs read.
        none = WarmedUp(0, again.trace, writes=False, captured={})
        largest = self.warmed_up.get(kind, none)
        # A later session may watch a smaller size than an earlier one.
        if largest.tokens <= tokens:
            spans = again.scratch_spans(result)
            largest = WarmedUp(tokens, again.trace, largest.writes, {}, spans)
        if kind is not None:
            writes = largest.writes or bool(watch.written())
            self.warmed_up[kind] = largest._replace(writes=writes)
        return result

    @undoing
    def _run_watched(
        self, undo: Undo, moves: _Moves, inputs: frozenset[int], calls: Calls[T]
    ) -> tuple[Watch, T]:
        """Make one run under a new watch; returns the watch and the run's result."""
        doors = side_doors.get()
        if self.has_parts and doors is not None:
            undo.set(side_doors, _NotedParts(doors, moves))
        watch = Watch(inputs, self.state.memory, generators=self.state.generators)
        result = watch.around(calls())
        moves.note()
        return watch, result

    @undoing
    def capture(
        self,
        undo: Undo,
        mode: GraphMode,
        descriptor: BatchDescriptor,
        call: Callable[[], T],
        *,
        in_one: bool,
        is_tried: bool = False,
    ) -> T:
        """Capture a forward, as one graph (`in_one`) or as pieces, and note which Python slots that
        changes. Operators are noted too if its size was watched, once for each kind and mode: that
        takes some microseconds an operator. If it `is_tried`, its writes are watched."""
        undo.set(drawn_from, self.reads.drawn.values())
        moves, self._is_tried, self._tried = self._moves, is_tried, None
        self._held_before = self._held()
        self._only_recorded = not self.capture_executes and in_one and mode is GraphMode.FULL
        if moves is not None and moves.namespaces.have_grown():
            moves.look_again(self.reads.walk())
        if is_tried and moves is not None:
            moves.begin(self.reads)
            # Where nothing runs, writes matter only if every call moves something in Python: else a
            # first call is known by what it moves there.
            runs = self.capture_executes or not in_one or mode is GraphMode.PIECEWISE
            if runs or self.moved.by_captures.get((mode, descriptor.kind)):
                records = not self.capture_executes
                self._tried = self._write_watch(moves, descriptor.num_tokens, records=records)
                call = partial(self._tried.around, call)
        largest = self.warmed_up.get(descriptor.kind)
        if largest is None or largest.tokens != descriptor.num_tokens or mode in largest.captured:
            result = call()
        else:
            watch = IssuedWatch()
            result = watch.run(call, in_one=in_one)
            largest.captured[mode] = watch.operators
        if moves is not None:
            moves.note_capture((mode, descriptor.kind), is_tried=is_tried)
        return result

    def before_replay(self, in_one: bool, is_last: bool) -> bool:
        if is_last and in_one and self._moves is not None:
            # What holds something new and is not watched contradicts its warm-up anyway.
            is_unwatched = self._is_tried and self._tried is None
            if is_unwatched or not self._moves.holds_new():
                return False
        if self._tried is not None:
            self._tried.save_recorded(self.is_in_graphs)
        self._only_recorded = False
        return True

    def copies(self) -> int:
        return self._held() - self._held_before

    def _held(self) -> int:
        regions = self._writes_of_size.regions
        return len(tree.tensors([(each.was, each.rows.at) for each in regions]))

    def may_try(self, kind: Hashable) -> bool:
        if not self.reads.watched:
            return True
        if kind not in self.warmed_up:
            return False
        # A single result cannot be taken out of a cache of functools; and a size alone may put a
        # tensor there.
        return not (self._moves or self._begin()).namespaces.cached()

    def contradicts(self) -> bool:
        moves, tried = self._moves, self._tried
        if moves is None or tried is None:
            return moves is not None and moves.is_new
        is_table = moves.has_moved and not tried.written <= self._steady
        return is_table or moves.is_new or tried.is_inexact

    def take_back(self) -> bool:
        return self._moves is not None and self._moves.take_back()

    def restore(self) -> None:
        """Put back declared state, and memory that runs wrote."""
        if self._moves is not None:
            self._moves.restore_memory()
        was_recorded, self._only_recorded = self._only_recorded, False
        if was_recorded:
            return
        self._writes_of_size.restore()
        self.state.restore_memory(self.state.memory.restore)

    def may_draw(self, *, is_tried: bool = False) -> bool:
        # Only watched warm-ups note the forward's own generators.
        generators = self.state.generators
        return not self.reads.watched or generators.have_drawn(generators.take())

    def reads_host_memory(self) -> bool:
        return self.reads.are_on_host()

    def give_up(self) -> None:
        if self._moves is not None:
            self._moves.settle(self.reads, contents=self.has_parts)
        if self.reads.watched:
            self.reads.settle()

    def settle(self, last_runs: Callable[[], None]) -> None:
        """After captures, and after `last_runs` of the forward: put back the Python
        slots that runs go on changing, check memory that only padding protects, find what graphs
        read, and warn of tensors of graphs that are left in Python.

        Raises what the runs raise, `StateTooLargeError` and `PythonStateError`."""
        moves, reads = self._moves, self.reads
        if moves is not None:
            moves.is_captured = True
        last_runs()
        if not reads.watched:
            return
        if moves is not None:
            moves.settle(reads, contents=self.has_parts)
        reads.protected += self.state.memory.check_protected(self.pad_rows)
        self.padding.note_protected(self.state.memory)
        places = reads.settle()
        if moves is not None:
            moves.warn_of_left(places.keyed)


def _filled_once(
    made: dict[int, tuple[str, OwnMemory]],
    watch: Watch,
    again: Watch,
    run: Callable[[], tuple[Watch, object]],
    reads: ReadSet,
) -> str | None:
    """Memory, in words, that the first run fills with padding's values once for all; None if there
    is none. Either the first run has `made` it, and the second, `again`, goes on from it. Or the
    first alone writes it, or more often: a flag in Python tells later runs that it is filled."""
    uses = again.uses
    for key, (path, memory) in made.items():
        use = uses.get(key)
        is_filled = use is not None and (memory.is_written and use.is_written)
        if use is not None and use.exposed and (memory.from_inputs or is_filled):
            return f"{path}: {use}"
    first, second = watch.written(), again.written()
    only_first = {
        key: use
        for key, use in first.items()
        if key not in second or len(use.writes) > len(second[key].writes)
    }
    if not only_first or second.keys() - first.keys() - watch.made_alive().keys():
        # All runs write the same memory, or each run writes other memory.
        return None
    third = run()[0].written()
    if any(key in third and third[key].writes == use.writes for key, use in only_first.items()):
        # Every second run writes it, and not the first alone.
        return None
    key, use = next(iter(only_first.items()))
    paths = [place.path for place, _, held in reads.walk().keyed if held == key]
    return ": ".join([*paths[:1], str(use)])


def _advice_on(filled: str) -> str:
    """What to do about memory that the first run fills: see `_filled_once`."""
    if "cache_utils.py" in filled:
        return (
            "a StaticCache of transformers in place of the DynamicCache: call the forward once "
            "with it before capture(). For a model that takes none: "
            "graphrt.hosts.transformers.with_graphs(model), which says whether it can have graphs; "
            "if it cannot, call the model without a runner"
        )
    if filled.partition(": ")[0].endswith("]"):
        return (
            "where a list grows: before capture() make a buffer of its largest length, "
            'register_buffer("hist", torch.zeros(length, ...)), and a tensor for the position, '
            'register_buffer("at", torch.zeros(1, dtype=torch.int64)); in the forward '
            "self.hist.index_copy_(0, self.at, new[None]) and self.at.add_(1) in place of "
            "append(new). Where each size fills an item once: call the forward once at each size "
            "before capture(). Where an eager part puts it there: write it in place, by copy_()"
        )
    return (
        "where the first call alone fills it: call the forward once on a real batch before "
        "capture(), at each size that fills one of its own. Where each call does: make it a buffer "
        "before capture(), and self.h.copy_(new) in place of self.h = new"
    )


class _NotedParts(SideDoors):
    """Runs eager parts through `doors`, and notes the Python slots of parts that change plain
    values alone, to have them put back.

    A warm-up has only padding. A part that keeps the scale of the first batch, say, keeps
    padding's: once that is put back, it keeps the scale of real rows at a replay, which runs it
    again. A part that makes a tensor too may set a flag that says so: both stay.
    """

    def __init__(self, doors: SideDoors, moves: _Moves) -> None:
        super().__init__()
        self._doors = doors
        self._moves = moves

    def watched(self, *call: Any, **options: Any) -> Any:
        python = self._moves.python
        before = python.take()
        result = self._doors.watched(*call, **options)
        now = python.take()
        moved = python.moved_slots(before, now)
        if all(is_plain(now[at]) and python.slots[at].way is not MEMORY for at in moved):
            self._moves.of_parts.update(moved)
        return result


class _Namespaces:
    """What a forward's objects, tensors, classes and modules have by names, and how much is in its
    caches of functools: a new name, or result, is in no slot."""

    def __init__(self, places: Places) -> None:
        dicts = [each for _, each in places.containers if isinstance(each, dict)]
        dicts += [each.__dict__ for _, each in places.tensors if type(each) in tree.BARE]
        names: dict[int, tuple[Any, Any, set[str] | None]]
        names = {id(each): (each, each, None) for each in dicts}
        names |= {
            at: (each.holder, each.key.table, each.key.names) for at, each in places.keys.items()
        }
        # What has names, these, and of a module's globals those that code looks up: Dynamo keeps
        # its compiled functions among the globals of a compiled module.
        self._holders = [*names.values()]
        self._names = [table for _, table, _ in names.values()]
        held = map(itemgetter(1), (*places.slots, *places.code))
        self._caches = [*{id(each): each for each in held if isinstance(each, LRU_CACHE)}.values()]
        self.begin()

    def begin(self) -> None:
        """A run begins."""
        self._sizes = [*map(len, self._names)]
        self._cached = self.cached()

    def cached(self) -> list[Any]:
        """The caches that hold tensors."""
        return [each for each in self._caches if tree.tensors(cached_results(each))]

    def have_grown(self) -> bool:
        """Whether the run has made or deleted a name, or put the first tensor into a cache."""
        is_less = any(
            len(names) < size for names, size in zip(self._names, self._sizes, strict=True)
        )
        return is_less or any(self._new()) or len(self.cached()) > len(self._cached)

    def _new(self) -> Iterator[tuple[Any, Any]]:
        """What has a new name, and the name: a dict has new keys at its end."""
        for (holder, names, looked_up), size in zip(self._holders, self._sizes, strict=True):
            if len(names) > size:
                for key in [*names][size:]:
                    if looked_up is None or key in looked_up:
                        yield holder, key

    def take_back(self) -> None:
        """Delete what the run has made."""
        for holder, key in [*self._new()]:
            way = CLASS_ATTRIBUTE if isinstance(holder, type) else ITEM
            put_back(Place(None, "", way, holder, key), MISSING)
        for cache in self.cached():
            if cache not in self._cached:
                cache.cache_clear()


@dataclass
class _Moves:
    """Counts the runs of a session that have changed each Python slot, and notes which tensors of
    graphs they left in such slots. State that no walk finds, as that of an iterator, is not known.
    """

    python: PythonState
    before: set[int]
    """Keys of the memory that the forward reached before the session."""
    is_in_graphs: Callable[[torch.Tensor], bool]
    of_weights: set[str]
    """Where a run has put a tensor that it computed without its inputs, as hooks that normalize a
    weight do at every call."""
    namespaces: _Namespaces
    known: MovedSlots
    of_parts: set[int] = field(default_factory=set)
    """Indices of the slots that eager parts have changed: put back even if that was once."""
    of_each: set[str] = field(default_factory=set)
    """Paths of the slots that the second run of a size changed too: each call does."""
    paths: set[str] = field(default_factory=set)
    """Paths of the slots that the last run has changed."""
    has_moved: bool = False
    """Whether the last run has changed a slot, or made one."""
    is_new: bool = False
    """Whether the last capture has changed slots that not every call changes, or left memory of
    graphs in one."""
    is_captured: bool = False
    """Whether all is captured: later runs have sizes that no step may ever have, so that one change
    by them counts as two."""

    def __post_init__(self) -> None:
        # index of a slot -> how many runs have changed it: one, if those of earlier sessions have.
        known = self.known.by_runs
        self._counts = [int(bool(known) and each.path in known) for each in self.python.slots]
        # The values before the run under way, or after the last one.
        self._last: Sequence[Any] = self.python.was
        # `_last` and `_counts` as of before the last run, for `take_back`.
        self._before_run: tuple[Sequence[Any], list[int]] = self._last, self._counts
        # Whether what was taken back had changed anything.
        self._is_changed = False
        # The slots that runs of this session have made, if any, with their values before a capture.
        self._made: PythonState | None = None
        self._made_before: Sequence[Any] = ()
        # Paths of tensors in graph memory that the session left in Python.
        self._left_paths: list[str] = []

    def begin(self, reads: ReadSet) -> None:
        """Before an eager run: no run of the forward has made the changes since the last one."""
        self.has_moved = self._is_changed = False
        if self.is_captured:
            # Now, as the run will replace the tensors that captures left.
            self.note_left(reads.places().keyed)
        self._last = self.python.take()
        self._before_run = self._last, [*self._counts]
        self.namespaces.begin()
        if self._made is not None:
            self._made_before = self._made.take()

    def look_again(self, places: Places) -> None:
        """Warm-ups have made attributes: note them, so that changes by captures are seen."""
        self.namespaces = _Namespaces(places)
        self._made = PythonState(places).without(self.python)
        self._made_before = self._made.was

    def _moved(self, now: Sequence[Any]) -> dict[str, Any]:
        """The paths of the slots that the run under way has changed, those among them that earlier
        runs have made, and what is in them now."""
        pairs = [(self.python, self._last, now)]
        if self._made is not None:
            pairs.append((self._made, self._made_before, self._made.take()))
        return {
            python.slots[at].path: after[at]
            for python, before, after in pairs
            for at in python.moved_slots(before, after)
        }

    def take_back(self) -> bool:
        """Put back, and do not count, what the last run has changed; returns whether it has."""
        self._last, self._counts = self._before_run
        self._is_changed |= self.namespaces.have_grown() or bool(self._moved(self.python.take()))
        self.namespaces.take_back()
        if self._made is not None:
            self._made.restore(self._made_before)
        self.python.restore(self._last)
        return self._is_changed

    def holds_new(self, besides: Collection[str] = ()) -> bool:
        """Whether the run under way has put anything but plain values into Python, `besides` that
        at these paths."""
        moved = self._moved(self.python.take())
        new = (value for path, value in moved.items() if path not in besides)
        return self.namespaces.have_grown() or not all(map(is_plain, new))

    def note(self, now: Sequence[Any] | None = None) -> None:
        """A run is over, or a capture, after which the values are those of `now`: count the slots
        that it has changed. Slots that only captures change are the platform's, or those of a hook
        around a graph, and are not counted."""
        last, self._before_run = self._last, (self._last, [*self._counts])
        self._last = self.python.take() if now is None else now
        moved = self.python.moved_slots(last, self._last)
        for at in moved:
            if now is None or self._counts[at]:
                self._counts[at] += 2 if self.is_captured else 1
        self.paths = {self.python.slots[at].path for at in moved}
        self.has_moved |= bool(moved) or self.namespaces.have_grown()

    def note_capture(self, kind: Hashable, *, is_tried: bool) -> None:
        """A capture of this mode and kind is over."""
        now = self.python.take()
        moved = self._moved(now)
        if not is_tried:
            known = self.known.by_captures.get(kind, moved)
            self.known.by_captures[kind] = frozenset(known) & moved.keys()
        self.is_new = (
            self.namespaces.have_grown()
            or not moved.keys() <= self.known.by_captures.get(kind, frozenset())
            or any(map(self.is_in_graphs, tree.tensors([*moved.values()])))
        )
        self.note(now)

    def note_made(self, watch: Watch, reads: ReadSet) -> dict[int, tuple[str, OwnMemory]]:
        """The memory that a run made and left in Python: key -> (path, memory)."""
        alive, made = watch.made_alive(), {}
        for place, tensor, key in reads.places().keyed if alive else ():
            if key not in alive:
                continue
            # Such as a table that is built once: graphs read it even if it is replaced later.
            reads.keep(tensor)
            made[key] = place.path, alive[key]
            if not (alive[key].from_inputs or alive[key].is_written):
                self.of_weights.add(place.path)
        return made

    def restore_memory(self) -> None:
        """Give tensors their memory back if more than one run gave them other memory (`set_`,
        `.data =`). Once is no state: the first call may convert a weight."""
        for slot, was, count in zip(self.python.slots, self.python.was, self._counts, strict=True):
            if count > 1 and slot.way is MEMORY:
                put_back(slot, was)

    def settle(self, reads: ReadSet, *, contents: bool) -> None:
        """After several runs: put back the slots that more than one of them has changed, or in
        which every run puts a new tensor.

        What was made once stays, such as a table that the first run builds. So do containers and
        objects with tensors, which graphs may read. Plain values in containers are put back only
        with `contents`: eager parts may depend on them; without eager parts they are the host's.
        """
        python, put_back_at = self.python, set()
        several = (at for at, count in enumerate(self._counts) if count > 1)
        self.known.by_runs |= {python.slots[at].path for at in (*several, *self.of_parts)}
        tensors: list[tuple[Place, torch.Tensor]] = []
        for at, (slot, was) in enumerate(zip(python.slots, python.was, strict=True)):
            is_moved = self._counts[at] > 1 or at in self.of_parts
            now = slot.get() if is_moved or reads.remade else was
            if not is_moved and (now is was or slot.path not in reads.remade):
                continue
            if isinstance(now, torch.Tensor):
                tensors.append((slot, now))
                put_back(slot, was)
            elif (contents or slot.way is not CONTENTS) and is_plain(now):
                put_back(slot, was)
            if slot.get() is was:
                put_back_at.add(slot.path)
        self.note_left(with_keys(tensors))
        # Each run made a tensor there, and the old one is there again: no graph reads that.
        remade = put_back_at & self.of_weights
        reads.remade |= remade
        self._left_paths = [path for path in self._left_paths if path not in remade]

    def note_left(self, tensors: Keyed) -> None:
        """Note the paths of new tensors among `tensors` that are in graph memory."""
        for place, tensor, key in tensors:
            # A path stays noted, even if a run puts another tensor there later.
            is_new = key not in self.before and place.path not in self._left_paths
            if is_new and self.is_in_graphs(tensor):
                self._left_paths.append(place.path)

    def warn_of_left(self, tensors: Keyed) -> None:
        """Warn of tensors of graphs, among the `tensors` reached now and noted before."""
        self.note_left(tensors)
        if self._left_paths:
            error = PythonStateError(
                "the forward keeps a tensor of its graph in Python: replays put no new one there, "
                "and later steps write over its memory",
                got=listed(self._left_paths),
                expected="results that are returned, or written in place",
                advice="return them, copy_() them into a tensor that is there before capture(), or "
                "leave clones of them in an @eager_break",
            )
            warn_caller(str(error), StaleTensorWarning)
