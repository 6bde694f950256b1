"""Task update on CUDA: a task's kernels get their new parameters before the graph is launched."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from graphrt.core.errors import TaskContractError
from graphrt.core.platform import TaskUpdate
from graphrt.cuda import driver
from graphrt.cuda.nodes import (
    KernelParameters,
    argument_bytes,
    destroy_graph,
    function_of,
    kernel_attribute,
    kernel_parameters,
    node_type,
    nodes_of,
    set_kernel,
    set_memory,
)

_KERNEL, _MEMCPY, _MEMSET = 0, 1, 2
# CUlaunchAttributeID: an update carries neither over.
_FIXED_ATTRIBUTES = (2, 4)
_PLAIN = (bool, int, float, str, type(None))
_REMEMBERED = 256
"""Sets of host arguments whose parameters a task keeps."""


class KernelImage:
    """All that one launch of a kernel is: parameters that outlive the graph they were read from."""

    __slots__ = ("_buffers", "_pointers", "key", "parameters")

    def __init__(self, found: KernelParameters, arguments: list[bytes]) -> None:
        self._buffers = [ctypes.create_string_buffer(each, len(each)) for each in arguments]
        self._pointers = (ctypes.c_void_p * len(arguments))(
            *(ctypes.addressof(buffer) for buffer in self._buffers)
        )
        self.parameters = KernelParameters.from_buffer_copy(found)
        self.parameters.arguments = ctypes.addressof(self._pointers)
        self.parameters.extra = None
        self.key = (
            found.function,
            found.kernel,
            tuple(found.grid),
            tuple(found.block),
            found.shared_bytes,
            *arguments,
        )


class TaskHandle:
    """The nodes of one captured task, and what they were last given."""

    def __init__(self, stream: torch.cuda.Stream, nodes: Sequence[int]) -> None:
        self.stream = stream
        self.nodes = list(nodes)
        self.kinds = [node_type(node) for node in self.nodes]
        self.fixed = [_fixed(node, kind) for node, kind in zip(nodes, self.kinds, strict=True)]
        self.images: OrderedDict[Hashable, list[KernelImage]] = OrderedDict()
        self.applied: list[KernelImage | None] = [None] * len(self.nodes)


class Tasks:
    """The tasks of open captures, and the updates of captured ones."""

    def __init__(self) -> None:
        self._before: dict[Any, set[int]] = {}

    def begin(self, graph: Any) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self._before[graph] = set(nodes_of(driver.capture_dependencies(stream)[0]))

    def end(self, graph: Any) -> TaskHandle:
        before = self._before.pop(graph)
        stream = torch.cuda.current_stream()
        now = nodes_of(driver.capture_dependencies(stream.cuda_stream)[0])
        return TaskHandle(stream, [node for node in now if node not in before])

    def abort(self, graph: Any) -> None:
        self._before.pop(graph, None)

    def replay(self, graph: Any, updates: Sequence[TaskUpdate], changed: bool) -> None:
        if changed:
            executable = graph.raw_cuda_graph_exec()
            for update in updates:
                self._apply(executable, update)
        graph.replay()

    def _apply(self, executable: int, update: TaskUpdate) -> None:
        handle: TaskHandle = update.handle
        key = _key(update.values)
        images = None if key is None else handle.images.get(key)
        if images is None:
            images = self._issue(executable, update)
            if images is None:
                return
            if key is not None:
                handle.images[key] = images
            if len(handle.images) > _REMEMBERED:
                handle.images.popitem(last=False)
        for place, image in enumerate(images):
            last = handle.applied[place]
            if image is not last and (last is None or image.key != last.key):
                if not set_kernel(executable, handle.nodes[place], image.parameters):
                    raise _refused(update, "new parameters for a kernel")
                handle.applied[place] = image

    def _issue(self, executable: int, update: TaskUpdate) -> list[KernelImage] | None:
        """Capture the task once more by itself; None if its nodes were set right away, because
        they are not all kernels whose arguments can be read."""
        handle: TaskHandle = update.handle
        stream = handle.stream.cuda_stream
        allocated = _allocations()
        with torch.cuda.stream(handle.stream):
            driver.begin_capture(stream)
            try:
                update.issue()
            except BaseException:
                driver.end_capture(stream)
                raise
            graph = driver.finish_capture(stream)
        try:
            if _allocations() != allocated:
                raise _refused(update, "memory that the task allocates")
            found = nodes_of(graph)
            kinds = [node_type(node) for node in found]
            if kinds != handle.kinds:
                raise _refused(update, f"{len(found)} nodes where it captured {len(handle.nodes)}")
            fixed = [_fixed(node, kind) for node, kind in zip(found, kinds, strict=True)]
            if fixed != handle.fixed:
                raise _refused(update, "another cluster, or a cooperative launch")
            images = [
                _image(node) if kind == _KERNEL else None
                for node, kind in zip(found, kinds, strict=True)
            ]
            readable = [image for image in images if image is not None]
            if len(readable) == len(found):
                return readable
            for node, source, kind in zip(handle.nodes, found, kinds, strict=True):
                if kind == _KERNEL:
                    done = set_kernel(executable, node, kernel_parameters(source))
                else:
                    done = set_memory(executable, node, source, kind)
                if not done:
                    raise _refused(update, "new parameters for a node")
            handle.applied = [None] * len(handle.nodes)
            return None
        finally:
            destroy_graph(graph)


def _image(node: int) -> KernelImage | None:
    found = kernel_parameters(node)
    function = function_of(found)
    arguments = None if function is None else argument_bytes(function, found)
    return None if arguments is None else KernelImage(found, arguments)


def _fixed(node: int, kind: int) -> Hashable:
    if kind != _KERNEL:
        return None
    return tuple(kernel_attribute(node, each) for each in _FIXED_ATTRIBUTES)


def _allocations() -> int:
    stats = torch._C._cuda_memoryStats(torch.cuda.current_device())
    return int(stats["allocation"]["all"]["allocated"])


def _key(values: Mapping[str, Any]) -> Hashable | None:
    """Host arguments as a key that tells 1 from 1.0 and 0.0 from -0.0; None if they are more than
    plain values, whose contents might change behind a key."""
    found: list[Hashable] = []
    for name, value in values.items():
        parts = value if isinstance(value, list | tuple) else (value,)
        if not all(type(part) in _PLAIN for part in parts):
            return None
        found.append((name, *(part.hex() if type(part) is float else part for part in parts)))
        found.append(tuple(type(part) for part in parts))
    return tuple(found)


def _refused(update: TaskUpdate, what: str) -> TaskContractError:
    return TaskContractError(
        f"task {update.name!r} cannot be updated in its graph",
        got=what,
        expected="the same kernels, copies and fills as at its capture, into given memory",
        advice="fix the workspace and the kernel choice at capture, or mark it @eager_break",
    )
