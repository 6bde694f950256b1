"""What every call of a wrapper reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphrt.core.batch import ForwardContext, GraphMode
from graphrt.core.capture.options import GraphOptions
from graphrt.core.replay import Entry, GraphPool


class Hot:
    """What every call of a wrapper reads.

    Apart from the wrapper, because a class with `__getattr__` loads its own attributes slowly.
    """

    __slots__ = (
        "always_checks",
        "by_slot",
        "checks",
        "clones",
        "fresh_containers",
        "mode",
        "one_call_a_step",
        "pool",
        "read_context",
        "read_stream_id",
    )

    def __init__(
        self,
        mode: GraphMode,
        pool: GraphPool,
        options: GraphOptions,
        read_context: Callable[[], ForwardContext | None],
    ) -> None:
        self.by_slot: list[Entry | None] = [None]  # the slot -1 finds the last, which is None
        # Whether arguments are compared at an entry's first replay, and at every one.
        self.checks = options.checks("capture")
        self.always_checks = options.checks("always")
        self.clones = options.outputs == "clone"
        self.fresh_containers = True
        self.mode = mode
        self.one_call_a_step = mode is GraphMode.FULL
        self.read_context = read_context
        self.use(pool)

    def use(self, pool: GraphPool) -> None:
        """Capture and replay in this pool."""
        self.pool = pool
        self.read_stream_id = pool.read_stream_id


def hot_of(wrapper: Any) -> Hot:
    """What a wrapper reads at every call, for who replays its graphs without calling it."""
    hot: Hot = wrapper._hot
    return hot
