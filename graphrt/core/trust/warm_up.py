"""The eager runs of a capture session, watched: what the forward reads and writes, found and
protected without being declared."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.errors import PythonStateError, StaleTensorWarning, warn_caller
from graphrt.core.base.thread_mode import without_kept_casts
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.guard import CaptureGuard, SideDoors, side_doors
from graphrt.core.capture.state import State
from graphrt.core.trust.compare import listed
from graphrt.core.trust.places.slots import CONTENTS, Place
from graphrt.core.trust.places.walk import Keyed, with_keys
from graphrt.core.trust.reads import ReadSet
from graphrt.core.trust.snapshot import (
    MEMORY,
    PythonState,
    StateSnapshot,
    is_plain,
    put_back,
)
from graphrt.core.trust.watching.watch import IssuedWatch, Kept, Trace, Use, Watch
from graphrt.core.trust.watching.writes import SavedWrites, WriteWatch, note_operators

T = TypeVar("T")


class WarmedUp(NamedTuple):
    """The watched warm-up of one kind of graph, at its largest size: `tokens`, operators, and
    whether it `writes` memory from outside."""

    tokens: int
    trace: Trace
    writes: bool
    captured: dict[GraphMode, list[Any]]
    """By mode, the operators that a capture of that size issued."""


class WatchedState:
    """State of a forward, for the time of one session: what is declared, and, if `reads` is there,
    what its warm-ups write. `restore` puts it back after every run, `settle` ends the session.

    `pads` are the padding values of index inputs: rows that may be written.
    """

    def __init__(
        self,
        declared: Iterable[State | torch.Tensor],
        *,
        limit_bytes: int,
        reads: ReadSet | None,
        warmed_up: dict[Hashable, WarmedUp],
        pads: Sequence[int],
        device_type: str,
        is_in_graphs: Callable[[torch.Tensor], bool],
        has_parts: bool,
    ) -> None:
        """`has_parts` says that graphs may have eager parts, `is_in_graphs` whether a tensor lies
        in graph memory."""
        self._snapshot = StateSnapshot(device_type, limit_bytes, declared=[*declared])
        # Memory that the last run wrote which was not watched; its capture writes it too.
        self._of_size = SavedWrites(limit_bytes)
        self._reads = reads
        self._warmed_up = warmed_up
        self._pads = pads
        self._has_parts = has_parts
        self._is_in_graphs = is_in_graphs
        self._moves: _Moves | None = None
        """Once something has run under watches."""
        # The kinds whose first run was in this session, which watches it if it watches any.
        self._kinds: set[Hashable] = set()
        # The memory that runs after the first one write.
        self._steady: set[int] = set()
        self.inputs_written: dict[int, Use] = {}
        """What the last run wrote of its inputs, by where it begins, if it was watched."""

    @undoing
    def run(
        self,
        undo: Undo,
        kind: Hashable,
        tokens: int,
        inputs: frozenset[int],
        calls: Callable[[], Callable[[], T]],
    ) -> T:
        """Run a forward of so many tokens eagerly; it is watched if it is the largest of its kind
        so far, or of no kind, or has written and moved what larger ones did not. `inputs` are the
        addresses of the storages of its inputs; `calls` makes the call of each run, outside of what
        is watched: a run may reshape its arguments.

        Raises `StateTooLargeError` if it writes what can be neither saved nor left.
        """
        self.inputs_written = {}
        if self._reads is None:
            self._kinds.add(kind)
            return calls()()
        moves = self._moves or self._begin(self._reads)
        moves.begin(self._reads)
        watched = partial(self._run_watched, moves, inputs, calls)
        # Autocast would keep its cast of a weight, and the run would read that and not the weight.
        without_kept_casts(undo)
        if not self.is_known(kind, tokens):
            return self._watch(moves, self._reads, kind, tokens, watched)
        self._of_size.restore()
        self._of_size = SavedWrites(self._snapshot.memory.limit)
        watch = WriteWatch(moves.before, self._of_size, self._snapshot.memory, tokens)
        result = watch.around(calls())
        moves.note()
        if not moves.has_moved or watch.written <= self._steady:
            return result
        # It may have filled memory of this size for the first and last time.
        self.restore()
        moves.take_back()
        return self._watch(moves, self._reads, kind, tokens, watched)

    def is_known(self, kind: Hashable, tokens: int) -> bool:
        """Whether a run of so many tokens is not to be watched: a larger one of its kind was. Where
        none is watched, whether one of its kind has run."""
        if self._reads is None:
            return kind in self._kinds
        known = self._warmed_up.get(kind)
        if kind is None or known is None or known.tokens < tokens:
            return False
        # What a forward writes has to be saved in every session.
        return kind in self._kinds or not known.writes

    @property
    def has_drawn(self) -> bool:
        """Whether random numbers may have been drawn on the host since the session began: by a
        forward, or by another thread."""
        return self._snapshot.generators.have_drawn(self._snapshot.generators.take())

    def _begin(self, reads: ReadSet) -> _Moves:
        places = reads.walk()
        self._snapshot.reach(places)
        note_operators()
        before = {key for _, _, key in places.keyed}
        # Sessions before this one may have watched all that it captures.
        moves = _Moves(self._snapshot.python, before, self._is_in_graphs, {*reads.remade})
        self._moves = moves
        return moves

    def _watch(
        self,
        moves: _Moves,
        reads: ReadSet,
        kind: Hashable,
        tokens: int,
        run: Callable[[], tuple[Watch, T]],
    ) -> T:
        self._kinds.add(kind)
        memory = self._snapshot.memory
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
                self._snapshot.python.restore()
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
        known = self._warmed_up.get(kind, WarmedUp(0, watch.trace, False, {}))
        # Sessions come in any order, and each watches what writes.
        if known.tokens <= tokens:
            known = WarmedUp(tokens, watch.trace, known.writes, {})
        if kind is not None:
            writes = known.writes or bool(watch.written())
            self._warmed_up[kind] = known._replace(writes=writes)
        return result

    @undoing
    def _run_watched(
        self,
        undo: Undo,
        moves: _Moves,
        inputs: frozenset[int],
        calls: Callable[[], Callable[[], T]],
    ) -> tuple[Watch, T]:
        doors = side_doors.get()
        if self._has_parts and doors is not None:
            undo.set(side_doors, _NotedParts(doors, moves))
        watch = Watch(inputs, self._snapshot.memory, generators=self._snapshot.generators)
        result = watch.around(calls())
        moves.note()
        return watch, result

    def capture(
        self,
        kind: Hashable,
        mode: GraphMode,
        tokens: int,
        function: Callable[[], T],
        *,
        in_one: bool,
    ) -> T:
        """Capture a forward, `in_one` or in pieces that it brings along; of the size that was
        watched its operators are noted. Of each kind once: that takes some microseconds an
        operator."""
        known = self._warmed_up.get(kind)
        if known is None or known.tokens != tokens or mode in known.captured:
            return function()
        watch = IssuedWatch()
        result = watch.run(function, in_one=in_one)
        known.captured[mode] = watch.operators
        return result

    def look(self) -> None:
        """Note what a run that was not watched, a capture, has moved in Python."""
        if self._moves is not None:
            self._moves.note(captured=True)

    def restore(self) -> None:
        """Put back what was declared and what was found."""
        if self._moves is not None:
            self._moves.restore_memory()
        self._of_size.restore()
        self._snapshot.restore_memory()

    @undoing
    def settle(self, undo: Undo, last_runs: Callable[[], None]) -> None:
        """After captures, and after `last_runs` of the forward: put back random numbers and what
        still moves in Python, look at memory that only padding protects, find what graphs read, and
        warn of tensors of graphs that are left in Python.

        Raises what the runs raise, `StateTooLargeError` and `PythonStateError`."""
        moves, reads = self._moves, self._reads
        undo.later(self._snapshot.generators.restore)
        if moves is not None:
            moves.is_captured = True
        last_runs()
        if reads is None:
            return
        if moves is not None:
            moves.settle(reads, contents=self._has_parts)
        reads.protected += self._snapshot.memory.check_protected(self._pads)
        places = reads.settle()
        if moves is not None:
            moves.note_left(places.keyed)
            moves.warn()


def _left_for_good(
    made: dict[int, tuple[str, Kept]],
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
    if not once or second.keys() - first.keys() - watch.kept().keys():
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

    def watched(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        guard: CaptureGuard | None = None,
    ) -> Any:
        python = self._moves.python
        before = python.take()
        result = self._doors.watched(function, args, kwargs, guard)
        now = python.take()
        moved = python.moved_slots(before, now)
        if all(is_plain(now[at]) and python.slots[at].way is not MEMORY for at in moved):
            self._moves.of_parts.update(moved)
        return result


class _Moves:
    """How many runs have moved each Python slot, and which tensors of graphs they left there.

    Whether there was something else, which no walk finds (the state of an iterator, say), is not
    known.
    """

    def __init__(
        self,
        python: PythonState,
        before: set[int],
        is_in_graphs: Callable[[torch.Tensor], bool],
        of_weights: set[str],
    ) -> None:
        self.python = python
        self.before = before
        """The memory that the forward has reached before."""
        self.of_parts: set[int] = set()
        """Slots that eager parts have moved, which are put back however often that was."""
        self.has_moved = False
        """Whether the last eager run has moved a slot."""
        self.is_captured = False
        """Whether all is captured: runs have sizes that no step may ever have from now on."""
        self._counts = [0] * len(python.slots)
        self._last: Sequence[Any] = python.was
        self._before: tuple[Sequence[Any], list[int]] = self._last, self._counts
        self._is_in_graphs = is_in_graphs
        # Where a run has put a tensor that it computed without its inputs, as hooks that normalize
        # a weight do at every call.
        self._of_weights = of_weights
        # Where tensors lie in graph memory that were not there before the session.
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

    def note_made(self, watch: Watch, reads: ReadSet) -> dict[int, tuple[str, Kept]]:
        """What a run has computed from its inputs, or written twice, and left in Python."""
        kept, made = watch.kept(), {}
        for place, tensor, key in reads.walk().keyed if kept else ():
            if key not in kept:
                continue
            # A table that is built once, say: graphs read it, whatever takes its place.
            reads.keep(tensor)
            if kept[key].from_inputs or kept[key].is_written:
                made[key] = place.path, kept[key]
            else:
                self._of_weights.add(place.path)
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
        # No tensor of a graph is where each run makes one and that of before is back.
        remade = back & self._of_weights
        reads.remade |= remade
        self._left = [path for path in self._left if path not in remade]

    def note_left(self, tensors: Keyed) -> None:
        """Look at what the forward reaches now."""
        for place, tensor, key in tensors:
            # What was refused once is, though it was taken back.
            is_news = key not in self.before and place.path not in self._left
            if is_news and self._is_in_graphs(tensor):
                self._left.append(place.path)

    def warn(self) -> None:
        """Warn of the tensors of graphs."""
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
