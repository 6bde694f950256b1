"""Watching a run for what it writes, and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from graphrt.core.base.thread_mode import ThreadMode, is_taken_apart
from graphrt.core.trust.watching.operators import OperatorFacts, facts_of, indices_of, written
from graphrt.core.trust.watching.watch import storage_key
from graphrt.core.trust.watching.writes import SavedWrites


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

    @staticmethod
    def passes_by(func: Any) -> bool:
        """Whether it writes nothing, and is not taken apart."""
        return not is_taken_apart(func) and not facts_of(func).writes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if is_taken_apart(func):
            return self.take_apart(func, args, kwargs or {})
        facts = facts_of(func)
        if facts.writes:
            for tensor in written(facts, args, kwargs or {}):
                key = storage_key(tensor)
                if key in self._known and not self._is_shown(key, facts, args):
                    use = f"{tensor.dtype} {tuple(tensor.shape)}"
                    self._saves.save(tensor, facts, args, kwargs or {}, use)
        return func(*args, **(kwargs or {}))

    def _is_shown(self, key: int | None, facts: OperatorFacts, args: Sequence[Any]) -> bool:
        if facts.rows is None or (key, facts.name) not in self._shown:
            return False
        return indices_of(args) == self._tokens
