"""Whether an update allocated device memory, which its graph would use after it is freed."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakSet

from graphrt.ascend.private_torch import memory_stats
from graphrt.core.base.errors import TaskContractError
from graphrt.core.capture.options import GraphOptions


class AllocationWatch:
    """Watches the first update of every graph; under `GRAPHRT_CHECK=always` each update.

    Only allocations on the stream of the update count, as other threads may allocate on theirs. A
    stream that had no memory and now has some shows one. If it had some already, from earlier work
    of the host, the process's count of allocations shows one while there is no other thread.
    """

    def __init__(self, npu: Any) -> None:
        self._npu = npu
        # Graphs whose tasks were all updated without an allocation.
        self._seen: WeakSet[Any] = WeakSet()
        options = GraphOptions()
        # Streams that had no memory when an update of a task began.
        self._without: set[int] = set()
        self._on, self._always = options.checks("capture"), options.checks("always")

    def looks_at(self, graph: Any) -> bool:
        """Whether the coming updates of `graph` are to be watched."""
        return self._on and (self._always or graph not in self._seen)

    def begin(self, stream: Any) -> int:
        """The allocations on the current device before an update on `stream`."""
        if stream.npu_stream not in self._without and not self._has_memory(stream):
            self._without.add(stream.npu_stream)
        return self.count()

    def passed(self, graph: Any) -> None:
        """Note that all tasks of `graph` were updated, and none of them allocated."""
        self._seen.add(graph)

    def count(self) -> int:
        """The allocations on the current device so far."""
        stats = memory_stats(self._npu.current_device())
        return int(stats["allocation"]["all"]["allocated"])

    def check(self, task: str, stream: Any, before: int) -> bool:
        """Raise `TaskContractError` if something was allocated on `stream` since `begin`; False if
        that cannot be told."""
        taken = self.count() - before
        if not taken or not self._has_memory(stream):
            return True
        if stream.npu_stream in self._without or threading.active_count() == 1:
            self._without.discard(stream.npu_stream)
            raise TaskContractError(
                f"the update of task {task!r} allocated device memory, which is free again while "
                "the graph writes to it",
                got=f"{taken} allocations on the update stream",
                expected="none: outputs and workspace are given",
                advice="the tasks of graphrt.ascend.attention bring their workspace; give another "
                "operator one, UpdatableTask(workspace=)",
            )
        return False

    def _has_memory(self, stream: Any) -> bool:
        segments = self._npu.memory_snapshot()
        return any(segment["stream"] == stream.npu_stream for segment in segments)
