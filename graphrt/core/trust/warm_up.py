"""The eager runs of a capture session, watched: what the forward reads and writes, found and
protected without being declared."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from graphrt.core.base._undo import Undo
from graphrt.core.base.errors import PythonStateError
from graphrt.core.base.thread_mode import without_kept_casts
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.state import SavedState
from graphrt.core.trust._left import say_what_is_left
from graphrt.core.trust.generators import Generators
from graphrt.core.trust.moving import Moving
from graphrt.core.trust.places.walk import places_of
from graphrt.core.trust.reads import ReadSet
from graphrt.core.trust.snapshot import PythonState
from graphrt.core.trust.watching.issued import IssuedWatch
from graphrt.core.trust.watching.trace import Trace
from graphrt.core.trust.watching.watch import Kept, Use, Watch, storage_key
from graphrt.core.trust.watching.write_watch import WriteWatch
from graphrt.core.trust.watching.writes import SavedWrites

T = TypeVar("T")


class WarmedUp(NamedTuple):
    """What the warm-up of one kind of graph did, at its largest size, and by mode the operators
    that a capture of that size issued."""

    tokens: int
    trace: Trace
    writes: bool
    captured: dict[GraphMode, list[Any]]


class WatchedState:
    """State of a forward, for the time of one session: what is declared, and, if `reads` is there,
    what its warm-ups write. `restore` puts it back after every run, `settle` ends the session.

    `pads` are the padding values of index inputs: rows that may be written.
    """

    def __init__(
        self,
        declared: SavedState,
        *,
        limit_bytes: int,
        forward: Any,
        reads: ReadSet | None,
        warmed_up: dict[Hashable, WarmedUp],
        pads: Sequence[int],
        device_type: str,
        is_in_graphs: Callable[[torch.Tensor], bool],
        each_warmed_up: bool,
        has_parts: bool,
    ) -> None:
        """`has_parts` says that graphs may have eager parts, `is_in_graphs` whether a tensor lies
        in graph memory, `each_warmed_up` whether no size is captured without a run of its own."""
        self._declared = declared
        self._forward = forward
        self._reads = reads
        self._warmed_up = warmed_up
        self._pads = pads
        self._saves = SavedWrites(limit_bytes)
        self._limit_bytes = limit_bytes
        # What the last run wrote that was not watched: its capture writes it too.
        self._of_size = SavedWrites(limit_bytes)
        self._moving: Moving | None = None
        self._python: PythonState | None = None
        self._outside: set[int] = set()
        self._watched: set[Hashable] = set()
        self._generators = Generators(device_type)
        self._is_in_graphs = is_in_graphs
        self._each_warmed_up = each_warmed_up
        self._has_parts = has_parts
        self._left: list[str] = []
        # Where a run has put a tensor that it computed without its inputs, as hooks that normalize
        # a weight do at every call.
        self._of_weights: set[str] = set()
        self._is_left_to_look_at = False
        self.inputs_written: dict[int, Use] = {}
        """What the last run wrote of its inputs, by where it begins, if it was watched."""

    def run(self, kind: Hashable, tokens: int, own: frozenset[int], function: Callable[[], T]) -> T:
        """Run a forward of so many tokens eagerly; it is watched if it is the largest of its kind
        so far, or of no kind. `own` are the addresses of the storages of its inputs.

        Raises `StateTooLargeError` if it writes what can be neither saved nor left.
        """
        self.inputs_written = {}
        if self._reads is None:
            return function()
        self._look_at_left()
        undo = Undo()
        try:
            # A weight is read, and named, where a cast of it would be.
            without_kept_casts(undo)
            result = self._run(self._reads, kind, tokens, own, function)
            undo.now()
            return result
        except BaseException:
            undo.now()
            raise

    def _run(
        self,
        reads: ReadSet,
        kind: Hashable,
        tokens: int,
        own: frozenset[int],
        function: Callable[[], T],
    ) -> T:
        if self._moving is None:
            places = places_of(self._forward)
            self._python = PythonState(places)
            self._moving = Moving(self._python)
            for generator in places.generators:
                self._generators.note(generator)
            keys = [storage_key(tensor) for _, tensor in places.tensors]
            self._outside = {key for key in keys if key is not None}
        self._moving.begin()
        known = self._warmed_up.get(kind)
        # What a forward writes has to be saved in every session.
        is_saved = kind in self._watched or (known is not None and not known.writes)
        if kind is not None and known is not None and known.tokens >= tokens and is_saved:
            self._of_size.restore()
            self._of_size = SavedWrites(self._limit_bytes)
            writes_alone = WriteWatch(self._outside, self._of_size, self._saves, tokens)
            result = writes_alone.around(function)
            self._moving.look_at_moved()
            return result
        self._watched.add(kind)
        watch = Watch(own, self._saves, generators=self._generators)
        result = watch.around(function)
        self.inputs_written = watch.own_written
        self._moving.look()
        made = self._made_and_reachable(watch)
        if made:
            self.restore()
            again = Watch(own, self._saves, generators=self._generators)
            result = again.around(function)
            reads.note(again)
            self._refuse_state_of_padding(made, again)
        reads.note(watch)
        writes = any(use.is_written for use in watch.uses.values())
        if kind is not None:
            found = WarmedUp(tokens, watch.trace, writes, {})
            if known is not None:
                # Sessions come in any order, and each watches what writes.
                largest = found if known.tokens <= tokens else known
                found = largest._replace(writes=writes or known.writes)
            self._warmed_up[kind] = found
        return result

    def capture(self, kind: Hashable, mode: GraphMode, tokens: int, function: Callable[[], T]) -> T:
        """Capture a forward; of the size that was watched its operators are noted. Of each kind
        once: that takes some microseconds an operator."""
        known = self._warmed_up.get(kind)
        if known is None or known.tokens != tokens or mode in known.captured:
            return function()
        watch = IssuedWatch()
        result = watch.run(function)
        known.captured[mode] = watch.operators
        return result

    def _made_and_reachable(self, watch: Watch) -> dict[int, tuple[str, Kept]]:
        """What a run has computed from its inputs, or written twice, and left in Python."""
        kept = watch.kept()
        if not kept:
            return {}
        assert self._reads is not None
        found = {}
        for place, tensor in places_of(self._forward).tensors:
            key = storage_key(tensor)
            if key is not None and key in kept:
                # A table that is built once, say: it may be built anew beside the graphs.
                self._reads.keep(tensor)
                if kept[key].from_inputs or kept[key].rewritten:
                    found[key] = place.path, kept[key]
                else:
                    self._of_weights.add(place.path)
        return found

    def _refuse_state_of_padding(self, made: dict[int, tuple[str, Kept]], again: Watch) -> None:
        """Raise `PythonStateError` if a forward goes on from what its warm-up has made."""
        for key, (path, kept) in made.items():
            use = again.uses.get(key)
            if use is None or not use.exposed or not (kept.from_inputs or use.is_written):
                continue
            assert self._python is not None
            self._python.restore()
            raise PythonStateError(
                "the forward makes state when it runs first, and goes on from it: a warm-up has "
                "left padding rows in it",
                got=f"{path}: {use}",
                expected="state that is there before capture()",
                advice="use state of a fixed size that is written in place (of transformers a "
                "StaticCache, never a DynamicCache), and make it before the capture: run the "
                "forward once on a real batch",
            )

    def is_new(self, kind: Hashable) -> bool:
        """Whether no run of this kind was watched yet."""
        return self._reads is not None and kind not in self._warmed_up

    def look(self) -> None:
        """Note what a run that was not watched, a capture, has moved in Python."""
        if self._moving is not None:
            self._moving.look_at_moved(captured=True)

    def restore(self) -> None:
        """Put back what was declared and what was found."""
        try:
            self._declared.restore()
        finally:
            if self._moving is not None:
                self._moving.restore_memory()
            self._of_size.restore()
            self._saves.restore()

    def settle(self, last_runs: Callable[[], None]) -> None:
        """After captures, and after `last_runs` of the forward: put back random numbers and what
        still moves in Python, look at memory that only padding protects, find what graphs read, and
        warn of tensors of graphs that are left in Python.

        Raises what the runs raise, `StateTooLargeError` and `PythonStateError`."""
        self._is_left_to_look_at = True
        python = self._python
        # These runs have sizes that no step may ever have, so what they move is no step's either.
        before = None if python is None else python.left()
        undo = Undo()
        try:
            undo.later(self._generators.restore)
            if python is not None and before is not None:
                undo.later(partial(python.put_numbers, before))
            last_runs()
            undo.now()
        except BaseException:
            undo.now()
            raise
        if self._reads is None:
            return
        put_back = set()
        if self._moving is not None:
            self._note_left(self._moving.anew())
            put_back = self._moving.settle(contents=self._has_parts)
        self._reads.protected += self._saves.check_protected(self._pads)
        # Every eager run makes these anew, and what is there now is what was there before.
        self._reads.remade |= put_back & self._of_weights
        self._left = [path for path in self._left if path not in self._reads.remade]
        places = self._reads.settle()
        if self._moving is None:
            return
        self._note_left((place.path, tensor) for place, tensor in places.tensors)
        if self._left:
            # What every run makes anew, such as a weight that a hook computes, is no table.
            kept = [path for path in self._left if path not in put_back]
            refused = bool(kept) and not self._each_warmed_up
            if refused:
                # Or eager steps would read there what no graph has computed yet.
                assert self._python is not None
                self._python.restore()
            say_what_is_left(kept if refused else self._left, each_warmed_up=not refused)

    def _look_at_left(self) -> None:
        """Before a last run, which leaves other tensors where those of graphs are."""
        if self._is_left_to_look_at and self._moving is not None:
            self._is_left_to_look_at = False
            self._note_left((p.path, tensor) for p, tensor in places_of(self._forward).tensors)

    def _note_left(self, found: Iterable[tuple[str, torch.Tensor]]) -> None:
        for path, tensor in found:
            key = storage_key(tensor)
            is_news = key is not None and key not in self._outside
            # What was refused once is, though it was taken back.
            if is_news and path not in self._left and self._is_in_graphs(tensor):
                self._left.append(path)
