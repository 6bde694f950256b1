"""Task update on CUDA: the kernels of a task get their new arguments before the graph is launched.

1. A capture notes the nodes of each task (`begin`, `end`).
2. At a replay with other host arguments each task is issued again, in a capture of its own.
3. The nodes recorded there must be those of the graph, in their order: the same kernels, copies and
   fills, on the same tensors. Grids and arguments may differ.
4. The graph's executable gets their parameters, node by node.

What needs other kernels, or more or fewer of them, is refused. A refusal half-way leaves some nodes
with new arguments; every later update sets all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from graphrt.core.base.errors import IN_PIECES, CaptureSyncError, GraphRTError, TaskContractError
from graphrt.core.device.contract import TaskUpdate, UpdateFigures
from graphrt.cuda.driver.api import (
    begin_capture,
    capture_dependencies,
    capture_is_invalidated,
    end_capture,
    finish_capture,
    need,
)
from graphrt.cuda.driver.nodes import (
    EMPTY,
    KERNEL,
    MEMORY_NAMES,
    destroy_graph,
    function_of,
    kernel_attribute,
    kernel_parameters,
    node_type,
    nodes_of,
    set_node,
)
from graphrt.cuda.driver.pointers import WordScan
from graphrt.cuda.explain import explain
from graphrt.cuda.private_torch import memory_stats
from graphrt.cuda.update.addresses import Homes, block_of, ranges_of

_FIXED_ATTRIBUTES = (2, 4)
"""CUlaunchAttributeID (cooperative, cluster): an update cannot change them."""


class _Captured(NamedTuple):
    """A node as it was captured: all that no update may change, and the words of its arguments
    (None where the driver does not tell their sizes)."""

    node: int
    kind: int
    kernel: Hashable
    words: Sequence[int] | None


class TaskHandle:
    """One captured task: its `nodes`, in their order, and the `stream` of the capture. `counts` are
    those of the pool."""

    def __init__(self, nodes: Sequence[int], stream: Any, counts: UpdateFigures) -> None:
        self.nodes = list(nodes)
        self.stream = stream
        self.counts = counts
        self._scan = WordScan()
        # Both are made at the first update: reading parameters may load a function, which no
        # capture allows.
        self._captured: list[_Captured] | None = None
        self._homes: Homes | None = None

    def update(self, update: TaskUpdate, executable: int) -> None:
        """Give the task's nodes in `executable` their new parameters; raises
        `TaskContractError`."""
        if self._captured is None:
            self._captured = [self._read(node) for node in self.nodes]
            self._homes = Homes(ranges_of(update.tensors()), block_of)
        with self._recorded(update) as sources:
            if len(sources) != len(self.nodes):
                was = len(self.nodes)
                raise refused(update, f"{len(sources)} nodes where it captured {was}")
            for captured, source in zip(self._captured, sources, strict=True):
                self._check(update, captured, self._read(source))
            for captured, source in zip(self._captured, sources, strict=True):
                if captured.kind == EMPTY:  # it only orders others
                    continue
                if not set_node(executable, captured.node, captured.kind, source):
                    raise refused(update, "parameters that the driver does not set in a graph")
                self.counts.patches += 1

    def _check(self, update: TaskUpdate, captured: _Captured, now: _Captured) -> None:
        """Raise where a node cannot become what the task has issued `now`."""
        kind = captured.kind
        if now.kind != kind:
            raise refused(update, f"a node of kind {now.kind} where it captured {kind}")
        if kind not in (KERNEL, EMPTY, *MEMORY_NAMES):
            raise refused(update, f"a node of kind {kind}, which cannot be updated")
        if now.kernel != captured.kernel:
            raise refused(update, "another kernel, another cluster or a cooperative launch")
        if captured.words is None or now.words is None:
            return
        assert self._homes is not None
        stranger = self._homes.stranger(captured.words, now.words)
        if stranger is not None:
            raise refused(
                update, f"a tensor that it was not captured with, at or around {stranger:#x}"
            )

    def _read(self, node: int) -> _Captured:
        kind, kernel = node_type(node), None
        if kind == KERNEL:
            launch = kernel_parameters(node)
            attributes = tuple(kernel_attribute(node, each) for each in _FIXED_ATTRIBUTES)
            kernel = function_of(launch) or launch.kernel, attributes
        return _Captured(node, kind, kernel, self._scan.words(node, kind))

    @contextmanager
    def _recorded(self, update: TaskUpdate) -> Iterator[list[int]]:
        """Capture the task once more; its nodes, which live until the `with` ends."""
        self.counts.reissues += 1
        allocated = _allocations()
        graph = _record(update, self.stream)
        try:
            if _allocations() != allocated:
                raise refused(update, "memory that the task allocates")
            yield nodes_of(graph)
        finally:
            destroy_graph(graph)


class Tasks:
    """Notes the nodes of tasks in captures, and updates them before replays."""

    def __init__(self) -> None:
        # graph -> the nodes that were captured before its open task.
        self._before: dict[Any, set[int]] = {}

    def begin(self, graph: Any) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self._before[graph] = set(nodes_of(capture_dependencies(stream)[0]))

    def end(self, graph: Any, counts: UpdateFigures) -> TaskHandle:
        before = self._before.pop(graph)
        stream = torch.cuda.current_stream()
        nodes = nodes_of(capture_dependencies(stream.cuda_stream)[0])
        counts.tasks += 1
        return TaskHandle([node for node in nodes if node not in before], stream, counts)

    def abort(self, graph: Any) -> None:
        self._before.pop(graph, None)

    def replay(self, graph: Any, updates: Sequence[TaskUpdate], changed: bool) -> None:
        if changed:
            need()  # The driver is called directly, and this thread may have no CUDA context yet.
            update_tasks(graph.raw_cuda_graph_exec(), updates)
        graph.replay()


def update_tasks(executable: int, updates: Sequence[TaskUpdate]) -> None:
    """Give an executable the parameters of all tasks; on an error nothing may be launched before
    the next update."""
    for update in updates:
        handle: TaskHandle = update.handle
        try:
            handle.update(update, executable)
        except BaseException:
            handle.counts.failed += 1
            raise


def refused(update: TaskUpdate, what: str) -> TaskContractError:
    """The error of a task that no longer fits the nodes of its capture."""
    return TaskContractError(
        f"task {update.name!r} cannot be updated in its graph",
        got=what,
        expected="the same kernels, copies and fills as at its capture, on the same tensors and "
        "into given memory",
        advice="pass lengths as tensors on the device, which graphs read at every replay; fix the "
        f"workspace and the choice of kernels at capture; or {IN_PIECES}",
    )


def _record(update: TaskUpdate, captured_on: torch.cuda.Stream) -> int:
    """The template of the task captured once more by itself, on the stream of its capture: there
    libraries have allocated already what they keep for each stream."""
    stream = captured_on.cuda_stream
    with torch.cuda.stream(captured_on):
        begin_capture(stream)
        try:
            update.issue()
            if capture_is_invalidated(stream):
                raise refused(update, "an error of device work that the task caught or ignored")
        except BaseException as error:
            invalid = capture_is_invalidated(stream)
            end_capture(stream)
            if isinstance(error, Exception) and not isinstance(error, GraphRTError):
                explained = explain(error)
                # torch refuses some calls before the driver does, and the capture stays valid.
                if invalid or isinstance(explained, CaptureSyncError):
                    raise refused(update, explained.what) from error
            raise
        return finish_capture(stream)


def _allocations() -> int:
    stats = memory_stats(torch.cuda.current_device())
    return int(stats["allocation"]["all"]["allocated"])
