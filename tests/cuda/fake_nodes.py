"""A driver that answers questions about the nodes of templates, on any machine."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from graphrt.cuda.driver.nodes import KernelParameters

KERNEL, MEMCPY, MEMSET, HOST, CHILD, EMPTY = 0, 1, 2, 3, 4, 5
_OK, _INVALID_VALUE = 0, 1
_OF_LIBRARY = 1000
"""Larger functions are kernels of a library, which have a function in each context."""


def words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


@dataclass
class Node:
    kind: int
    arguments: Sequence[bytes] = ()
    function: int = 1
    packed: bool = False
    grid: int = 1
    child: int = 0
    refused: bool = False
    kept: list[Any] = field(default_factory=list)


def kernel(*arguments: bytes, function: int = 1, packed: bool = False, grid: int = 1) -> Node:
    return Node(KERNEL, arguments, function, packed, grid)


@dataclass
class FakeNodes:
    """The templates by number; a node is called by ten times its template's and its place."""

    graphs: dict[int, list[Node]]
    asked_sizes: int = 0
    executable: dict[int, Any] = field(default_factory=dict)
    """Node -> the parameters that it was set to: (function, grid, *arguments), or bytes."""
    refuses: int = _OK
    """What it answers where parameters of a node are to be set; then it sets none."""
    clusters: set[int] = field(default_factory=set)
    """The functions that are launched in clusters."""

    def _node(self, handle: Any) -> Node:
        graph, place = divmod(handle.value, 10)
        return self.graphs[graph][place]

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = 1
        return _OK

    def cuGraphGetNodes(self, graph: Any, out: Any, count: Any) -> int:
        if graph.value not in self.graphs:
            return _INVALID_VALUE
        nodes = self.graphs[graph.value]
        count._obj.value = len(nodes)
        for place in range(len(nodes) if out is not None else 0):
            out[place] = 10 * graph.value + place
        return _OK

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        kind._obj.value = self._node(node).kind
        return _OK

    def cuGraphKernelNodeGetParams_v2(self, node: Any, parameters: Any) -> int:
        asked, out = self._node(node), parameters._obj
        assert isinstance(out, KernelParameters)
        if asked.refused:
            return _INVALID_VALUE
        out.grid[0] = asked.grid
        if asked.function > _OF_LIBRARY:
            out.kernel = asked.function
        else:
            out.function = asked.function
        if asked.packed:
            data = ctypes.create_string_buffer(b"".join(asked.arguments))
            size = ctypes.c_size_t(len(data) - 1)
            extra = (ctypes.c_uint64 * 5)(1, ctypes.addressof(data), 2, ctypes.addressof(size), 0)
            asked.kept += [data, size, extra]
            out.extra = ctypes.addressof(extra)
            return _OK
        buffers = [ctypes.create_string_buffer(each, len(each)) for each in asked.arguments]
        places = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        asked.kept += [*buffers, places]
        out.arguments = ctypes.addressof(places)
        return _OK

    def cuKernelGetFunction(self, function: Any, kernel: Any) -> int:
        function._obj.value = kernel.value - _OF_LIBRARY
        return _OK

    def _sizes(self, function: int) -> list[int]:
        arguments = (
            node.arguments
            for nodes in self.graphs.values()
            for node in nodes
            if node.kind == KERNEL and node.function % _OF_LIBRARY == function
        )
        return list(map(len, next(arguments)))

    def cuFuncGetParamInfo(self, function: Any, place: Any, offset: Any, size: Any) -> int:
        self.asked_sizes += place.value == 0
        sizes = self._sizes(function.value)
        if place.value >= len(sizes):
            return _INVALID_VALUE
        size._obj.value = sizes[place.value]
        return _OK

    def cuGraphKernelNodeGetAttribute(self, node: Any, attribute: int, value: Any) -> int:
        value[0] = bytes([self._node(node).function in self.clusters])
        return _OK

    def cuGraphExecKernelNodeSetParams_v2(self, executable: Any, node: Any, launch: Any) -> int:
        assert executable.value and self._node(node).kind == KERNEL
        if self.refuses:
            return self.refuses
        launch = launch._obj
        function = launch.function or launch.kernel - _OF_LIBRARY
        places = ctypes.cast(launch.arguments, ctypes.POINTER(ctypes.c_void_p))
        arguments = [
            ctypes.string_at(places[place], size)
            for place, size in enumerate(self._sizes(function))
        ]
        self.executable[node.value] = (function, launch.grid[0], *arguments)
        return _OK

    def cuGraphExecMemcpyNodeSetParams(
        self, executable: Any, node: Any, parameters: Any, context: Any
    ) -> int:
        assert executable.value and context.value and self._node(node).kind in (MEMCPY, MEMSET)
        if self.refuses:
            return self.refuses
        self.executable[node.value] = parameters
        return _OK

    cuGraphExecMemsetNodeSetParams = cuGraphExecMemcpyNodeSetParams

    def cuGraphDestroy(self, graph: Any) -> int:
        for node in self.graphs.pop(graph.value):
            # It owned the arguments: nobody may read them any more.
            for buffer in node.kept[: len(node.arguments)]:
                ctypes.memset(buffer, 0xFF, ctypes.sizeof(buffer))
        return _OK

    def cuGraphMemcpyNodeGetParams(self, node: Any, out: Any) -> int:
        (parameters,) = self._node(node).arguments
        out[: len(parameters)] = parameters
        return _OK

    cuGraphMemsetNodeGetParams = cuGraphMemcpyNodeGetParams

    def cuGraphChildGraphNodeGetGraph(self, node: Any, graph: Any) -> int:
        graph._obj.value = self._node(node).child
        return _OK
