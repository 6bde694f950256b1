"""A driver that keeps the parameters of nodes in Python: task update runs on any machine."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graphrt.cuda.update.images import EMPTY, KERNEL, Image, Images, image_of, with_skipped
from graphrt.cuda.update.ladder import TaskNode, UpdateCounts
from graphrt.cuda.update.tasks import GraphTasks, TaskHandle

_FUNCTIONS: list[tuple[int, ...]] = [()]
"""The sizes of the arguments of each kernel, which is a place in this list."""
_VARIANT = 1000


def kernel(*arguments: bytes, grid: int = 4, variant: int = 0) -> Image:
    sizes = tuple(map(len, arguments))
    if sizes not in _FUNCTIONS[1:]:
        _FUNCTIONS.append(sizes)
    function = _FUNCTIONS.index(sizes, 1)
    launch = (variant or None, function, None, (grid, 1, 1), (128, 1, 1), 0)
    if variant > 1:
        launch = (None, function + variant * _VARIANT, *launch[2:])
    return image_of(KERNEL, launch, arguments)


def copy(parameters: bytes) -> Image:
    return image_of(1, (), [parameters])


def read(kind: int, reference: Any) -> Image:
    """What a driver finds behind `reference`."""
    if kind != KERNEL:
        return image_of(kind, (), [bytes(reference)])
    parameters = reference._obj
    pointers = ctypes.cast(parameters.arguments, ctypes.POINTER(ctypes.c_void_p))
    variant, function = divmod(parameters.kernel, _VARIANT)
    sizes = _FUNCTIONS[function]
    return kernel(
        *(ctypes.string_at(pointers[place], size) for place, size in enumerate(sizes)),
        grid=parameters.grid[0],
        variant=variant or parameters.function or 0,
    )


@dataclass
class FakeCalls:
    """Executable and template as dicts from node to image; `refuse` names calls that fail."""

    executable: dict[int, Image] = field(default_factory=dict)
    template: dict[int, Image] = field(default_factory=dict)
    refuse: set[str] = field(default_factory=set)
    off: set[int] = field(default_factory=set)
    made: list[str] = field(default_factory=list)

    def _answers(self, call: str) -> int:
        self.made.append(call)
        return int(call in self.refuse)

    def set_kernel(self, executable: Any, node: Any, reference: Any) -> int:
        if self._answers("set_kernel"):
            return 1
        self.executable[node.value] = read(KERNEL, reference)
        return 0

    def set_memory(self, kind: int, executable: Any, node: Any, reference: Any) -> int:
        if self._answers("set_memory"):
            return 1
        self.executable[node.value] = read(kind, reference)
        return 0

    def set_enabled(self, executable: Any, node: Any, enabled: bool) -> int:
        if self._answers("set_enabled"):
            return 1
        (self.off.discard if enabled else self.off.add)(node.value)
        return 0

    def set_template(self, kind: int, node: Any, reference: Any) -> int:
        if self._answers("set_template"):
            return 1
        self.template[node.value] = read(kind, reference)
        return 0

    def update_whole(self, executable: int, template: int) -> bool:
        if self._answers("update_whole"):
            return False
        self.executable = dict(self.template)
        self.off.clear()
        return True

    def can_instantiate(self, template: int) -> bool:
        return not self._answers("can_instantiate")


class FakeGraph:
    """A captured graph; making its executable anew takes what the template has."""

    def __init__(self, calls: FakeCalls) -> None:
        self.calls = calls

    def raw_cuda_graph(self) -> int:
        return 1

    def raw_cuda_graph_exec(self) -> int:
        return 2

    def instantiate(self) -> None:
        self.calls.made.append("instantiate")
        self.calls.executable = dict(self.calls.template)
        self.calls.off.clear()


Issue = Callable[[int, Mapping[str, Any]], Images]


@dataclass
class FakeTask:
    """A task: layer number `layer` of what `images` issues."""

    layer: int
    images: Issue
    values: Mapping[str, Any]
    kin: str = "attention"
    handle: Any = None
    issued: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"layer.{self.layer}"

    def issue(self) -> Images:
        self.issued.append(self.layer)
        return self.images(self.layer, self.values)

    def likeness(self) -> str:
        return self.kin

    def tensors(self) -> list[Any]:
        return []


class FakeRecorder:
    def __init__(self, calls: FakeCalls, counts: UpdateCounts) -> None:
        self.calls, self.counts = calls, counts
        self.base: Images = ()

    def handle(self, tasks: GraphTasks, nodes: list[int]) -> TaskHandle:
        task_nodes = []
        for node, image in zip(nodes, self.base, strict=True):
            task_nodes.append(TaskNode(node, image.kind))
            for state in (self.calls.executable, self.calls.template):
                state[node] = image
        handle = TaskHandle(tasks, task_nodes, [None] * len(task_nodes))
        handle.captured_as(self.base)
        return handle

    def read(self, handle: TaskHandle) -> None:
        pass

    def images(self, update: FakeTask) -> Images:
        self.counts.reissues += 1
        return with_skipped(update.handle.bases, update.issue())


class Fake:
    """A graph whose layers `issue(layer, values)` issues, captured with `values`."""

    def __init__(
        self,
        issue: Issue,
        values: Mapping[str, Any],
        *,
        layers: int = 4,
        kin: Callable[[int], str] = lambda _: "attention",
    ) -> None:
        self.calls, self.counts = FakeCalls(), UpdateCounts()
        self.graph = FakeGraph(self.calls)
        self.issued: list[int] = []
        recorder = FakeRecorder(self.calls, self.counts)
        tasks = GraphTasks(recorder, self.calls, self.counts)
        self.tasks = [
            FakeTask(layer, issue, values, kin(layer), issued=self.issued)
            for layer in range(layers)
        ]
        for task in self.tasks:
            recorder.base = issue(task.layer, values)
            first = 100 * (task.layer + 1)
            task.handle = tasks.add([first + place for place in range(len(recorder.base))])
        self._update = tasks.update

    def step(self, *values: Mapping[str, Any]) -> int:
        """Update with these values for all layers, or for each; returns how many were issued."""
        before = len(self.issued)
        of_layers = values if len(values) > 1 else values * len(self.tasks)
        for task, new in zip(self.tasks, of_layers, strict=True):
            task.values = new
        self._update(self.graph, self.tasks)
        return len(self.issued) - before

    def right(self) -> bool:
        """Whether every node of the executable is what issuing its layer by itself would make."""
        off = set()
        for task in self.tasks:
            images = task.images(task.layer, task.values)
            nodes = [node.pointer.value for node in task.handle.nodes]
            off |= set(nodes[len(images) :])
            for node, image in zip(nodes, images, strict=False):
                if image.kind != EMPTY and self.calls.executable[node] != image:
                    return False
        return off == self.calls.off
