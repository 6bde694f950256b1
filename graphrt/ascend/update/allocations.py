"""Whether an update allocated device memory, which its graph would use after it is freed."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from graphrt.ascend.private_torch import memory_stats
from graphrt.core.base import TaskContractError
from graphrt.core.capture import GraphOptions


class AllocationWatch:
    """Looks at the first new arguments of every graph; under `GRAPHRT_CHECK=always` at all.

    Only what an operator took on the stream of the update counts: other threads may allocate at the
    same time, on theirs.
    """

    def __init__(self, npu: Any) -> None:
        self._npu = npu
        self._seen: WeakSet[Any] = WeakSet()
        options = GraphOptions()
        self._on, self._always = options.checks("capture"), options.checks("always")

    def looks_at(self, graph: Any) -> bool:
        """Whether the coming updates of `graph` are to be watched."""
        return self._on and (self._always or graph not in self._seen)

    def passed(self, graph: Any) -> None:
        """Note that all tasks of `graph` were updated, and none of them allocated."""
        self._seen.add(graph)

    def count(self) -> int:
        """The allocations on the current device so far."""
        stats = memory_stats(self._npu.current_device())
        return int(stats["allocation"]["all"]["allocated"])

    def check(self, task: str, stream: Any, before: int) -> None:
        """Raise `TaskContractError` if something was allocated on `stream` since `before`."""
        taken = self.count() - before
        if taken and self._has_memory(stream):
            raise TaskContractError(
                f"the update of task {task!r} allocated device memory, which is free again while "
                "the graph writes to it",
                got=f"{taken} allocations on the update stream",
                expected="none: outputs and workspace are given",
                advice="the tasks of graphrt.ascend.attention bring their workspace; give another "
                "operator one, UpdatableTask(workspace=)",
            )

    def _has_memory(self, stream: Any) -> bool:
        segments = self._npu.memory_snapshot()
        return any(segment["stream"] == stream.npu_stream for segment in segments)
