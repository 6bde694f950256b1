"""Task update on CUDA: a task's nodes get their new parameters before the graph is launched."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from graphrt.core.base.errors import IN_PIECES, CaptureSyncError, GraphRTError, TaskContractError
from graphrt.core.device.contract import TaskUpdate
from graphrt.cuda.driver.api import (
    begin_capture,
    capture_dependencies,
    capture_is_invalidated,
    end_capture,
    finish_capture,
    need,
)
from graphrt.cuda.driver.nodes import (
    NodeCalls,
    destroy_graph,
    is_chain,
    kernel_attribute,
    kernel_parameters,
    memory_parameters,
    node_type,
    nodes_of,
)
from graphrt.cuda.explain import explain
from graphrt.cuda.private_torch import memory_stats
from graphrt.cuda.update.addresses import Homes, block_of, ranges_of, strange_address
from graphrt.cuda.update.images import (
    EMPTY,
    KERNEL,
    SETTABLE,
    Image,
    Images,
    read_image,
    with_skipped,
)
from graphrt.cuda.update.ladder import Calls, Ladder, TaskNode, UpdateCounts
from graphrt.cuda.update.siblings import Family

# CUlaunchAttributeID (cooperative, cluster): an update cannot change them.
_FIXED_ATTRIBUTES = (2, 4)


class TaskHandle:
    """The nodes of one captured task, by which it is updated: `fixed` are the attributes of each
    node that no update may change. `stream` is that of the capture, `tasks` all of the graph."""

    def __init__(
        self,
        tasks: GraphTasks,
        nodes: Sequence[TaskNode],
        fixed: Sequence[Hashable],
        stream: Any = None,
    ) -> None:
        self.tasks = tasks
        self.nodes = list(nodes)
        self.fixed = list(fixed)
        self.stream = stream
        self.kinds = [node.kind for node in self.nodes]
        # The captured parameters; None where a node's arguments cannot be read.
        self.bases: Images | None = None
        # The memory that the captured parameters point to; made at the first update that differs.
        self.homes: Homes | None = None

    def captured_as(self, images: Sequence[Image | None]) -> None:
        """Note the parameters that the nodes were captured with."""
        for node, image in zip(self.nodes, images, strict=True):
            node.captured_as(image)
        bases = tuple(image for image in images if image is not None)
        self.bases = bases if len(bases) == len(images) else None


class Recorder:
    """Issues tasks again, each in its own capture, and reads the parameters of the new nodes."""

    def __init__(self, counts: UpdateCounts) -> None:
        self._counts = counts
        # CUDA function -> sizes of its parameters. The graph keeps its functions loaded, so none of
        # these addresses becomes another function's.
        self._sizes: dict[int, tuple[int, ...] | None] = {}

    def handle(self, tasks: GraphTasks, nodes: Sequence[int]) -> TaskHandle:
        """The handle of a task that was captured as `nodes`."""
        kinds = [node_type(node) for node in nodes]
        task_nodes = [TaskNode(node, kind) for node, kind in zip(nodes, kinds, strict=True)]
        fixed = list(map(_fixed, nodes, kinds))
        return TaskHandle(tasks, task_nodes, fixed, torch.cuda.current_stream())

    def read(self, handle: TaskHandle) -> None:
        """Read the parameters that a task was captured with. Its capture is over: reading may load
        a function, which no capture allows."""
        nodes = [(node.pointer.value or 0, node.kind) for node in handle.nodes]
        handle.captured_as(
            [
                read_image(node, kind, self._sizes) if kind in SETTABLE else None
                for node, kind in nodes
            ]
        )

    def images(self, update: TaskUpdate) -> Images:
        """The parameters of a task with its new host arguments, checked against its capture."""
        handle: TaskHandle = update.handle
        with self._recorded(update) as nodes:
            read = [
                read_image(node, kind, self._sizes)
                for node, kind in zip(nodes, handle.kinds, strict=False)
            ]
        images = tuple(image for image in read if image is not None)
        if len(images) != len(read):
            raise refused(update, "a kernel whose arguments the driver does not tell")
        assert handle.bases is not None
        images = with_skipped(handle.bases, images)
        self._check_tensors(update, images)
        return images

    def give_directly(self, update: TaskUpdate, ladder: Ladder) -> None:
        """Issue a task whose parameters cannot be read, and pass the driver's own structs on."""
        handle: TaskHandle = update.handle
        with self._recorded(update) as nodes:
            if len(nodes) < len(handle.nodes):
                raise refused(update, "fewer launches, of a kernel whose arguments are unknown")
            for node, source in zip(handle.nodes, nodes, strict=True):
                if node.kind not in SETTABLE:
                    raise refused(update, f"a node of kind {node.kind}, which cannot be updated")
                if node.kind == KERNEL:
                    ladder.give_directly(node, ctypes.byref(kernel_parameters(source)))
                elif node.kind != EMPTY:
                    ladder.give_directly(node, memory_parameters(source, node.kind))

    @contextmanager
    def _recorded(self, update: TaskUpdate) -> Iterator[list[int]]:
        """Capture the task once more; its nodes, which live until the `with` ends."""
        handle: TaskHandle = update.handle
        self._counts.reissues += 1
        allocated = _allocations()
        graph = _captured(update)
        try:
            if _allocations() != allocated:
                raise refused(update, "memory that the task allocates")
            nodes = nodes_of(graph)
            kinds = [node_type(node) for node in nodes]
            if not self._fits(kinds, handle):
                raise refused(update, _other_nodes(kinds, handle.kinds))
            if list(map(_fixed, nodes, kinds)) != handle.fixed[: len(nodes)]:
                raise refused(update, "another cluster, or a cooperative launch")
            yield nodes
        finally:
            destroy_graph(graph)

    def _fits(self, kinds: Sequence[int], handle: TaskHandle) -> bool:
        """Whether nodes of these kinds fit on the captured ones. Fewer do, if each of these waits
        for the one before: the last ones are switched off."""
        if not kinds or list(kinds) != handle.kinds[: len(kinds)]:
            return False
        nodes = [node.pointer.value or 0 for node in handle.nodes]
        return len(kinds) == len(nodes) or is_chain(nodes)

    def _check_tensors(self, update: TaskUpdate, images: Images) -> None:
        handle: TaskHandle = update.handle
        assert handle.bases is not None
        if images == handle.bases:
            return
        if handle.homes is None:
            handle.homes = Homes(ranges_of(update.tensors()), block_of)
        stranger = strange_address(handle.homes, handle.bases, images)
        if stranger is not None:
            raise refused(
                update, f"a tensor that it was not captured with, at or around {stranger:#x}"
            )


class GraphTasks:
    """Updates all tasks of one captured graph, by families of layers that are alike."""

    def __init__(self, recorder: Any, calls: Calls, counts: UpdateCounts) -> None:
        self.ladder = Ladder(calls, counts)
        self._recorder = recorder
        self._counts = counts
        # None before the first update.
        self._families: list[Family] | None = None
        # Indices of the tasks whose parameters the driver does not tell.
        self._unreadable: list[int] = []

    def add(self, nodes: Sequence[int]) -> TaskHandle:
        """The handle of a task that was captured as `nodes`."""
        handle: TaskHandle = self._recorder.handle(self, nodes)
        self.ladder.nodes += handle.nodes
        self._counts.tasks += 1
        return handle

    def update(self, graph: Any, updates: Sequence[TaskUpdate]) -> None:
        """Give the executable of `graph` the parameters of all tasks; on an error nothing may be
        launched before the next update."""
        try:
            self.ladder.begin(graph.raw_cuda_graph_exec())
            if self._families is None:
                self._families = self._sorted(updates)
            prepared = [
                (family, family.prepare(updates, self._recorder.images))
                for family in self._families
            ]
            self._give(graph, updates, prepared)
        except BaseException:  # `@undoing` written out, as every step with tasks comes here
            self._counts.failed += 1
            raise

    def _give(self, graph: Any, updates: Sequence[TaskUpdate], prepared: Any) -> None:
        try:
            for index in self._unreadable:
                self._recorder.give_directly(updates[index], self.ladder)
            for family, of_layers in prepared:
                family.give(of_layers, self.ladder)
            self.ladder.settle(graph)
        except BaseException:  # `@undoing` written out, as every step with tasks comes here
            self.ladder.forget()
            raise

    def _sorted(self, updates: Sequence[TaskUpdate]) -> list[Family]:
        groups: dict[Hashable, list[int]] = {}
        self._unreadable = []
        for index, update in enumerate(updates):
            handle: TaskHandle = update.handle
            self._recorder.read(handle)
            if handle.bases is None:
                self._unreadable.append(index)
                continue
            launches = tuple((image.launch, image.sizes) for image in handle.bases)
            likeness = update.likeness(), tuple(handle.kinds), tuple(handle.fixed), launches
            groups.setdefault(likeness, []).append(index)
        return [
            Family([updates[index].handle.nodes for index in indices], indices, self._counts)
            for indices in groups.values()
        ]


class Tasks:
    """Notes the nodes of tasks in captures, and updates them before replays."""

    def __init__(self) -> None:
        # graph -> the nodes that were captured before its open task.
        self._before: dict[Any, set[int]] = {}
        # graph -> its tasks. Weak, as only captures look here: handles hold the tasks for replays.
        self._graphs: WeakKeyDictionary[Any, GraphTasks] = WeakKeyDictionary()

    def begin(self, graph: Any, counts: UpdateCounts) -> None:
        if graph not in self._graphs:
            self._graphs[graph] = GraphTasks(Recorder(counts), NodeCalls(), counts)
        stream = torch.cuda.current_stream().cuda_stream
        self._before[graph] = set(nodes_of(capture_dependencies(stream)[0]))

    def end(self, graph: Any) -> TaskHandle:
        nodes_before = self._before.pop(graph)
        stream = torch.cuda.current_stream().cuda_stream
        nodes = nodes_of(capture_dependencies(stream)[0])
        return self._graphs[graph].add([node for node in nodes if node not in nodes_before])

    def abort(self, graph: Any) -> None:
        self._before.pop(graph, None)
        self._graphs.pop(graph, None)

    def replay(self, graph: Any, updates: Sequence[TaskUpdate], changed: bool) -> None:
        if changed:
            need()  # The driver is called directly, and this thread may have no CUDA context yet.
            tasks: GraphTasks = updates[0].handle.tasks
            tasks.update(graph, updates)
        graph.replay()


def refused(update: TaskUpdate, what: str) -> TaskContractError:
    """The error of a task that no longer fits the nodes of its capture."""
    return TaskContractError(
        f"task {update.name!r} cannot be updated in its graph",
        got=what,
        expected="the same kernels, copies and fills as at its capture, on the same tensors and "
        "into given memory",
        advice=f"fix the workspace and the kernel choice at capture, or {IN_PIECES}",
    )


def _captured(update: TaskUpdate) -> int:
    """The template of the task captured once more by itself, on the stream of its capture: there
    libraries have allocated already what they keep for each stream."""
    handle: TaskHandle = update.handle
    stream = handle.stream.cuda_stream
    with torch.cuda.stream(handle.stream):
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


def _other_nodes(now: list[int], captured: list[int]) -> str:
    if len(now) != len(captured):
        return f"{len(now)} nodes where it captured {len(captured)}"
    return f"nodes of kinds {now} where it captured {captured}"


def _fixed(node: int, kind: int) -> Hashable:
    if kind != KERNEL:
        return None
    return tuple(kernel_attribute(node, each) for each in _FIXED_ATTRIBUTES)


def _allocations() -> int:
    stats = memory_stats(torch.cuda.current_device())
    return int(stats["allocation"]["all"]["allocated"])
