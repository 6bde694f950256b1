"""The eager runs of a capture session, watched: what the forward reads and writes, found and
protected without being declared."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.errors import PythonStateError, StaleTensorWarning, warn_caller
from graphrt.core.base.thread_mode import without_kept_casts
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.guard import SideDoors, side_doors
from graphrt.core.trust.compare import listed
from graphrt.core.trust.places.slots import CONTENTS, Place
from graphrt.core.trust.places.walk import Keyed, with_keys
from graphrt.core.trust.reads import ReadSet
from graphrt.core.trust.snapshot import MEMORY, PythonState, StateSnapshot, is_plain, put_back
from graphrt.core.trust.watching.watch import IssuedWatch, OwnMemory, Trace, Use, Watch
from graphrt.core.trust.watching.writes import SavedWrites, WriteWatch, note_operators

T = TypeVar("T")

Calls: TypeAlias = Callable[[], Callable[[], T]]
"""Makes the call of each run, outside of what is watched: a run may reshape its arguments."""


class WarmedUp(NamedTuple):
    """The watched warm-up of one kind of graph, at its largest size: `tokens`, operators, and
    whether it `writes` memory from outside."""

    tokens: int
    trace: Trace
    writes: bool
    captured: dict[GraphMode, list[Any]]
    """By mode, the operators that a capture of that size issued."""


@dataclass
class WatchedState:
    """State of a forward, for the time of one session: what `snapshot` declares, and, if `reads` is
    watched, what its warm-ups write. `restore` puts it back after every run, `settle` ends the
    session.
    """

    snapshot: StateSnapshot
    reads: ReadSet
    warmed_up: dict[Hashable, WarmedUp]
    pads: Sequence[int]
    """The padding values of index inputs: rows that may be written."""
    is_in_graphs: Callable[[torch.Tensor], bool]
    """Whether a tensor lies in graph memory."""
    has_parts: bool
    """Whether graphs may have eager parts."""
    inputs_written: dict[int, Use] = field(default_factory=dict)
    """What the last run wrote of its inputs, by where it begins, if it was watched."""

    def __post_init__(self) -> None:
        # Memory that the last run wrote which was not watched; its capture writes it too.
        self._of_size = SavedWrites(self.snapshot.memory.limit)
        # Once something has run under watches.
        self._moves: _Moves | None = None
        # The kinds of which this session has watched a run.
        self._kinds: set[Hashable] = set()
        # The memory that runs after the first one write.
        self._steady: set[int] = set()

    @undoing
    def run(
        self, undo: Undo, kind: Hashable, tokens: int, inputs: frozenset[int], calls: Calls[T]
    ) -> T:
        """Run a forward of so many tokens eagerly; it is watched if it is the largest of its kind
        so far, or of no kind, or has written and moved what larger ones did not. `inputs` are the
        addresses of the storages of its inputs.

        Raises `StateTooLargeError` if it writes what can be neither saved nor left.
        """
        self.inputs_written = {}
        if not self.reads.watched:
            return calls()()
        moves = self._moves or self._begin()
        moves.begin(self.reads)
        # Autocast would keep its cast of a weight, and the run would read that and not the weight.
        without_kept_casts(undo)
        known = self.warmed_up.get(kind)
        # What a forward writes has to be saved in every session.
        is_saved = known is not None and (kind in self._kinds or not known.writes)
        if known is not None and known.tokens >= tokens and is_saved:
            memory = self.snapshot.memory
            self._of_size.restore()
            self._of_size = SavedWrites(memory.limit)
            watch = WriteWatch(moves.before, self._of_size, memory, tokens)
            result = watch.around(calls())
            moves.note()
            if not moves.has_moved or watch.written <= self._steady:
                return result
            # It may have filled memory of this size for the first and last time.
            self.restore()
            moves.take_back()
        run = partial(self._run_watched, moves, inputs, calls)
        return self._watch(moves, kind, tokens, run)

    def _begin(self) -> _Moves:
        places = self.reads.walk()
        self.snapshot.reach(places)
        note_operators()
        before = {key for _, _, key in places.keyed}
        # Sessions before this one may have watched all that it captures.
        moves = _Moves(self.snapshot.python, before, self.is_in_graphs, {*self.reads.remade})
        self._moves = moves
        return moves

    def _watch(
        self, moves: _Moves, kind: Hashable, tokens: int, run: Callable[[], tuple[Watch, T]]
    ) -> T:
        self._kinds.add(kind)
        reads, memory = self.reads, self.snapshot.memory
        watch, result = run()
        note_operators()
        self.inputs_written = watch.inputs_written
        made = moves.note_made(watch, reads)
        if made or watch.written():
            left = memory.take()
            self.restore()
            # Run again on what the first run left: a table of indices that it filled may have held
            # anything before.
            memory.restore(left)
            again, result = run()
            reads.note(again)
            padding = _left_for_good(made, watch, again, run, reads)
            if padding is not None:
                self.snapshot.python.restore()
                raise PythonStateError(
                    "the forward makes or fills memory when it runs first, and goes on from it: a "
                    "warm-up has only padding",
                    got=padding,
                    expected="state that is made and filled before capture()",
                    advice="run the forward once on a real batch before the capture (at each size "
                    "that fills a table of its own), or make the tensor before, and copy_() into "
                    "it: self.h.copy_(new) in place of self.h = new; of transformers use a "
                    "StaticCache, never a DynamicCache",
                )
            self._steady |= again.written().keys()
        reads.note(watch)
        known = self.warmed_up.get(kind, WarmedUp(0, watch.trace, False, {}))
        # Sessions come in any order, and each watches what writes.
        if known.tokens <= tokens:
            known = WarmedUp(tokens, watch.trace, known.writes, {})
        if kind is not None:
            writes = known.writes or bool(watch.written())
            self.warmed_up[kind] = known._replace(writes=writes)
        return result

    @undoing
    def _run_watched(
        self, undo: Undo, moves: _Moves, inputs: frozenset[int], calls: Calls[T]
    ) -> tuple[Watch, T]:
        doors = side_doors.get()
        if self.has_parts and doors is not None:
            undo.set(side_doors, _NotedParts(doors, moves))
        watch = Watch(inputs, self.snapshot.memory, generators=self.snapshot.generators)
        result = watch.around(calls())
        moves.note()
        return watch, result

    def capture(
        self, mode: GraphMode, descriptor: BatchDescriptor, call: Callable[[], T], *, in_one: bool
    ) -> T:
        """Capture a forward, `in_one` or in pieces that it brings along, and note what that moves
        in Python; of the size that was watched its operators are noted too. Of each kind once: that
        takes some microseconds an operator."""
        known = self.warmed_up.get(descriptor.kind)
        if known is None or known.tokens != descriptor.num_tokens or mode in known.captured:
            result = call()
        else:
            watch = IssuedWatch()
            result = watch.run(call, in_one=in_one)
            known.captured[mode] = watch.operators
        if self._moves is not None:
            self._moves.note(captured=True)
        return result

    def restore(self) -> None:
        """Put back what was declared and what was found."""
        if self._moves is not None:
            self._moves.restore_memory()
        self._of_size.restore()
        self.snapshot.restore_memory()

    @undoing
    def settle(self, undo: Undo, last_runs: Callable[[], None]) -> None:
        """After captures, and after `last_runs` of the forward: put back random numbers and what
        still moves in Python, look at memory that only padding protects, find what graphs read, and
        warn of tensors of graphs that are left in Python.

        Raises what the runs raise, `StateTooLargeError` and `PythonStateError`."""
        moves, reads = self._moves, self.reads
        undo.later(self.snapshot.generators.restore)
        if moves is not None:
            moves.is_captured = True
        last_runs()
        if not reads.watched:
            return
        if moves is not None:
            moves.settle(reads, contents=self.has_parts)
        reads.protected += self.snapshot.memory.check_protected(self.pads)
        places = reads.settle()
        if moves is not None:
            moves.warn_of_left(places.keyed)


def _left_for_good(
    made: dict[int, tuple[str, OwnMemory]],
    watch: Watch,
    again: Watch,
    run: Callable[[], tuple[Watch, object]],
    reads: ReadSet,
) -> str | None:
    """The memory, in words, that a first run has `made` and from which `again` goes on, or that it
    has written otherwise: a flag in Python says that it did, so no later `run` would."""
    uses = again.uses
    for key, (path, kept) in made.items():
        use = uses.get(key)
        if use is not None and use.exposed and (kept.from_inputs or use.is_written):
            return f"{path}: {use}"
    first, second = watch.written(), again.written()
    once = {
        key: use
        for key, use in first.items()
        if key not in second or len(use.writes) > len(second[key].writes)
    }
    if not once or second.keys() - first.keys() - watch.made_alive().keys():
        # All runs write the same, or each writes other memory than the one before.
        return None
    third = run()[0].written()
    if any(key in third and third[key].writes == use.writes for key, use in once.items()):
        # Not only the first run: every second one does.
        return None
    key, use = next(iter(once.items()))
    paths = [place.path for place, _, held in reads.walk().keyed if held == key]
    return ": ".join([*paths[:1], str(use)])


class _NotedParts(SideDoors):
    """Eager parts, which `doors` run, and the Python slots that those move which move plain values
    alone.

    A warm-up has only padding, so what a part keeps of it, such as the scale of the first batch, is
    put back: parts run at every replay, and keep it of real rows then. A part that makes a tensor
    too may have a flag that says so: both stay.
    """

    def __init__(self, doors: SideDoors, moves: _Moves) -> None:
        super().__init__()
        self._doors = doors
        self._moves = moves

    def watched(self, *call: Any, **more: Any) -> Any:
        python = self._moves.python
        before = python.take()
        result = self._doors.watched(*call, **more)
        now = python.take()
        moved = python.moved_slots(before, now)
        if all(is_plain(now[at]) and python.slots[at].way is not MEMORY for at in moved):
            self._moves.of_parts.update(moved)
        return result


@dataclass
class _Moves:
    """How many runs have moved each Python slot, and which tensors of graphs they left there.

    Whether there was something else, which no walk finds (the state of an iterator, say), is not
    known.
    """

    python: PythonState
    before: set[int]
    """The memory that the forward has reached before."""
    is_in_graphs: Callable[[torch.Tensor], bool]
    of_weights: set[str]
    """Where a run has put a tensor that it computed without its inputs, as hooks that normalize a
    weight do at every call."""
    of_parts: set[int] = field(default_factory=set)
    """Slots that eager parts have moved, which are put back however often that was."""
    has_moved: bool = False
    """Whether the last eager run has moved a slot."""
    is_captured: bool = False
    """Whether all is captured: runs have sizes that no step may ever have from now on."""

    def __post_init__(self) -> None:
        self._counts = [0] * len(self.python.slots)
        self._last: Sequence[Any] = self.python.was
        self._before: tuple[Sequence[Any], list[int]] = self._last, self._counts
        # Paths of tensors in graph memory that the session left in Python.
        self._left: list[str] = []

    def begin(self, reads: ReadSet) -> None:
        """Before an eager run: what is there by now no run of the forward has moved."""
        self.has_moved = False
        if self.is_captured:
            # The run puts other tensors in the place of those that graphs left.
            self.note_left(reads.walk().keyed)
        self._last = self.python.take()

    def take_back(self) -> None:
        """Put back what the last run has moved."""
        self._last, self._counts = self._before
        self.python.restore(self._last)

    def note(self, *, captured: bool = False) -> None:
        """A run is over. What captures alone move is the platform's, or of a hook around a graph,
        and not counted."""
        last, self._before = self._last, (self._last, [*self._counts])
        self._last = self.python.take()
        moved = self.python.moved_slots(last, self._last)
        for at in moved:
            if not captured or self._counts[at]:
                self._counts[at] += 2 if self.is_captured else 1
        self.has_moved |= bool(moved)

    def note_made(self, watch: Watch, reads: ReadSet) -> dict[int, tuple[str, OwnMemory]]:
        """What a run has computed from its inputs, or written twice, and left in Python."""
        kept, made = watch.made_alive(), {}
        for place, tensor, key in reads.walk().keyed if kept else ():
            if key not in kept:
                continue
            # A table that is built once, say: graphs read it, whatever takes its place.
            reads.keep(tensor)
            if kept[key].from_inputs or kept[key].is_written:
                made[key] = place.path, kept[key]
            else:
                self.of_weights.add(place.path)
        return made

    def restore_memory(self) -> None:
        """Give tensors the memory back that more than one run took from them (`set_`, `.data =`): a
        weight may be converted at the first call."""
        for slot, was, count in zip(self.python.slots, self.python.was, self._counts, strict=True):
            if count > 1 and slot.way is MEMORY:
                put_back(slot, was)

    def settle(self, reads: ReadSet, *, contents: bool) -> None:
        """After several runs: put back what more than one of them has moved, or what every run puts
        there anew.

        What was made once stays, such as a table that the first run builds. So do containers and
        objects with tensors, which graphs may read. Plain values in containers are put back only
        with `contents`: eager parts may depend on them; without eager parts they are the host's.
        """
        python, back = self.python, set()
        tensors: list[tuple[Place, torch.Tensor]] = []
        for at, (slot, was) in enumerate(zip(python.slots, python.was, strict=True)):
            moves = self._counts[at] > 1 or at in self.of_parts
            now = slot.get() if moves or reads.remade else was
            if not moves and (now is was or slot.path not in reads.remade):
                continue
            if isinstance(now, torch.Tensor):
                tensors.append((slot, now))
                put_back(slot, was)
            elif (contents or slot.way is not CONTENTS) and is_plain(now):
                put_back(slot, was)
            if slot.get() is was:
                back.add(slot.path)
        self.note_left(with_keys(tensors))
        # Each run made a tensor there, and the old one was put back: no graph reads it there.
        remade = back & self.of_weights
        reads.remade |= remade
        self._left = [path for path in self._left if path not in remade]

    def note_left(self, tensors: Keyed) -> None:
        """Look at what the forward reaches now."""
        for place, tensor, key in tensors:
            # What was refused once is, though it was taken back.
            is_news = key not in self.before and place.path not in self._left
            if is_news and self.is_in_graphs(tensor):
                self._left.append(place.path)

    def warn_of_left(self, tensors: Keyed) -> None:
        """Warn of tensors of graphs among what the forward reaches now, and of those before."""
        self.note_left(tensors)
        if self._left:
            error = PythonStateError(
                "the forward leaves tensors of its graphs in Python: no replay makes new ones, and "
                "steps write in their memory",
                got=listed(self._left),
                expected="results that are returned, or written in place",
                advice="return them, copy_() them into a tensor that is there before capture(), or "
                "leave clones of them in an @eager_break",
            )
            warn_caller(str(error), StaleTensorWarning)
