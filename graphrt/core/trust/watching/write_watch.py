"""Watching a run for what it writes, and nothing else."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from graphrt.core.base import ThreadMode, is_taken_apart
from graphrt.core.trust.watching.operators import OperatorFacts, facts_of, written
from graphrt.core.trust.watching.watch import storage_key
from graphrt.core.trust.watching.writes import SavedWrites


class WriteWatch(ThreadMode, results_count=False):
    """Saves what a run writes of memory that is `known`, and looks at nothing else.

    Not the rows of index writes: it is for runs of nothing but padding, whose rows are nobody's,
    and that the largest run of the kind has shown.
    """

    supports_higher_order_operators = True

    def __init__(self, known: Collection[int], saves: SavedWrites) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = known
        self._saves = saves

    @staticmethod
    def passes_by(func: Any) -> bool:
        """Whether it writes nothing, or rows alone, and is not taken apart."""
        return not is_taken_apart(func) and not _writes(facts_of(func))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if is_taken_apart(func):
            return self.take_apart(func, args, kwargs or {})
        facts = facts_of(func)
        if _writes(facts):
            for tensor in written(facts, args, kwargs or {}):
                if storage_key(tensor) in self._known:
                    use = f"{tensor.dtype} {tuple(tensor.shape)}"
                    self._saves.save(tensor, facts, args, kwargs or {}, use)
        return func(*args, **(kwargs or {}))


def _writes(facts: OperatorFacts) -> bool:
    return bool(facts.writes) and facts.rows is None
