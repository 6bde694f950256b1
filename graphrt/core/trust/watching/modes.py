"""Modes that see one thing of a run each, and cost it little: writes, operators, streams."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.thread_mode import ThreadMode, is_taken_apart
from graphrt.core.capture.guard import is_listed
from graphrt.core.device.figures import GraphWork
from graphrt.core.replay.recording import active, counted, issued
from graphrt.core.trust.watching.operators import OperatorFacts, facts_of, indices_of, written
from graphrt.core.trust.watching.watch import storage_key
from graphrt.core.trust.watching.writes import SavedWrites

T = TypeVar("T")

_COLLECTIVES = ("c10d", "_c10d_functional")


class WriteWatch(ThreadMode, results_count=False):
    """Saves what a run of so many `tokens` writes of memory that is `known`, and looks at nothing
    else.

    Not the rows that each token of it writes where those of the largest run of the kind did: that
    run was of padding alone too, so its rows, which are in `shown`, are these. An index of another
    length, and one of a single token, may name any row.
    """

    supports_higher_order_operators = True

    def __init__(
        self, known: Collection[int], saves: SavedWrites, shown: SavedWrites, tokens: int
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = known
        self._saves = saves
        self._shown = shown.row_writes if tokens > 1 else ()
        self._tokens = tokens
        self.written: set[int] = set()
        """Those of the `known` that the run has written."""

    @staticmethod
    def passes_by(func: Any) -> bool:
        """Whether it writes nothing, and is not taken apart."""
        return not is_taken_apart(func) and not facts_of(func).writes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_taken_apart(func):
            return self.take_apart(func, args, kwargs)
        facts = facts_of(func)
        for tensor in written(facts, args, kwargs):
            key = storage_key(tensor)
            if key is None or key not in self._known:
                continue
            self.written.add(key)
            if not self._is_shown(key, facts, args):
                use = f"{tensor.dtype} {tuple(tensor.shape)}"
                self._saves.save(tensor, facts, args, use)
        return func(*args, **kwargs)

    def _is_shown(self, key: int | None, facts: OperatorFacts, args: Sequence[Any]) -> bool:
        if facts.rows is None or (key, facts.name) not in self._shown:
            return False
        return indices_of(args) == self._tokens


class IssuedWatch(ThreadMode):
    """Notes the operators of a step that captures, in their order: some forwards take another way
    then. Here those that run eagerly, between graphs. What graphs record is noted by their
    captures, which find the list in `issued`: a platform's own operators, which run below, are none
    of the forward's."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Any] = []

    @undoing
    def run(self, undo: Undo, function: Callable[[], T]) -> T:
        """Call `function`, which captures."""
        undo.set(issued, self.operators)
        return self.around(function)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        recording = active.get()
        if recording is not None and recording.segment_open:
            return func(*args, **kwargs)
        if is_taken_apart(func):
            return self.take_apart(func, args, kwargs)
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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_taken_apart(func):
            return self.take_apart(func, args, kwargs)
        self.work.collectives |= getattr(func, "namespace", "") in _COLLECTIVES
        if is_listed(func, self._breaks):
            self.work.breaks += 1
        if not facts_of(func).is_view:
            stream, operators = self._stream_id(), self.work.operators
            operators[stream] = operators.get(stream, 0) + 1
        return func(*args, **kwargs)
