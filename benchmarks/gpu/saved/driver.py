"""Graphs as arrays: read from the driver, kept in a file, built by the driver again."""

from __future__ import annotations

import bisect
import ctypes
import json
import os
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphrt.cuda.driver import nodes
from graphrt.cuda.driver.api import check, need

CLUSTER, CLUSTER_SCHEDULING = 4, 5
ATTRIBUTES = (1, 2, CLUSTER, CLUSTER_SCHEDULING, 8, 9, 10, 11, 14)
"""CUlaunchAttributeID of a kernel node; programmatic launches are edges of a kind of their own."""
NODE = [("kind", "u4"), ("kernel", "u4"), ("launch", "u4", 7), ("start", "u8")]
POINTER = [("at", "u4"), ("memory", "u4"), ("offset", "u8")]
ATTRIBUTE = [("node", "u4"), ("which", "u4"), ("value", "V64")]
EDGE = [("source", "u4"), ("target", "u4"), ("kind", "u8")]
FIELDS = {"nodes": NODE, "pointers": POINTER, "attributes": ATTRIBUTE, "edges": EDGE, "blob": "u1"}
PARTS = {part: np.dtype(fields, align=True) for part, fields in FIELDS.items()}
"""The arrays of a graph, as build.c reads them. `blob` has the parameters of each node."""
_P, _Z = ctypes.c_void_p, ctypes.c_size_t

Arrays = dict[str, np.ndarray]


def status(name: str, *arguments: Any) -> int:
    # Numbers are as wide as addresses: x86-64 and Arm pass both in registers.
    given = [_P(each) if isinstance(each, int) else each for each in arguments]
    return int(getattr(need(), name)(*given))


def call(name: str, *arguments: Any) -> None:
    check(name, status(name, *arguments))


def trait(function: int, which: int) -> int:
    """A CUfunction_attribute."""
    value = ctypes.c_int(0)
    call("cuFuncGetAttribute", ctypes.byref(value), which, function)
    return value.value


def layout(function: int) -> list[tuple[int, int]]:
    """Offset and bytes of each argument."""
    offset, size, found = _Z(0), _Z(0), []
    at = ctypes.byref(offset), ctypes.byref(size)
    while not status("cuFuncGetParamInfo", function, len(found), *at):
        found.append((offset.value, size.value))
    return found


def functions_of(graph: int) -> set[int]:
    """The functions that the kernels of a graph launch."""
    kernels = [each for each in nodes.nodes_of(graph) if nodes.node_type(each) == nodes.KERNEL]
    return {nodes.function_of(nodes.kernel_parameters(each)) or 0 for each in kernels}


class Unsupported(Exception):
    """A graph that cannot be written to a file."""


Values = list[tuple[int, bytes]]
"""Bytes by their offsets."""


def _arguments(launch: nodes.KernelParameters, layout: Sequence[tuple[int, int]]) -> Values:
    """The arguments of a launch, by their offsets."""
    if launch.arguments or not layout:
        places = (_P * len(layout)).from_address(launch.arguments) if layout else ()
        sizes = zip(layout, places, strict=True)
        return [(offset, ctypes.string_at(at, size)) for (offset, size), at in sizes]
    # One buffer: pairs of a key (1: its address follows, 2: that of its size) and a value.
    pairs = (ctypes.c_uint64 * 5).from_address(launch.extra)
    given = dict(zip(pairs[0:4:2], pairs[1:4:2], strict=True))
    if sorted(given) != [1, 2]:
        raise Unsupported(f"arguments given as {list(pairs)}")
    buffer = ctypes.string_at(given[1], ctypes.c_uint64.from_address(given[2]).value)
    return [(offset, buffer[offset : offset + size]) for offset, size in layout]


def _attributes(node: int) -> dict[int, bytes | None]:
    return {each: nodes.kernel_attribute(node, each) for each in ATTRIBUTES}


class Reader:
    """Turns graphs into arrays. `known` are the starts and ends of memories that have a name."""

    def __init__(self, known: Sequence[tuple[int, int]], identify: Callable[[int], Any]) -> None:
        self._known, self._identify = known, identify
        self._starts = [start for start, _ in known]
        self.kernels: list[dict[str, Any]] = []
        self._index: dict[int, int] = {}
        self._defaults: list[dict[int, bytes | None]] = []

    def kernel(self, launch: nodes.KernelParameters) -> int:
        """The number of a kernel, which is added if it is new."""
        function = nodes.function_of(launch) or 0
        if function not in self._index:
            graph, fresh = _P(), _P()
            call("cuGraphCreate", ctypes.byref(graph), 0)
            into = ctypes.byref(fresh), graph, None, 0
            call("cuGraphAddKernelNode_v2", *into, ctypes.byref(launch))
            self._defaults.append(_attributes(fresh.value or 0))
            nodes.destroy_graph(graph.value or 0)
            self._index[function] = len(self.kernels)
            known = {"identity": self._identify(function), "layout": layout(function), "shared": 0}
            self.kernels.append(known)
        kernel = self.kernels[self._index[function]]
        kernel["shared"] = max(kernel["shared"], launch.shared_bytes)
        return self._index[function]

    def read(self, graph: int) -> Arrays:
        """The arrays of a graph. Raises `Unsupported` where something of it has no name."""
        handles = nodes.nodes_of(graph)
        number = {handle: index for index, handle in enumerate(handles)}
        blob, found, pointers, attributes = bytearray(), [], [], []
        for index, handle in enumerate(handles):
            kind, kernel, how, start = nodes.node_type(handle), 0, (0,) * 7, len(blob)
            if kind == nodes.KERNEL:
                launch = nodes.kernel_parameters(handle)
                kernel = self.kernel(launch)
                how = (*launch.grid, *launch.block, launch.shared_bytes)
                values = _arguments(launch, self.kernels[kernel]["layout"])
                attributes += self._changed(index, handle, kernel)
            elif kind in nodes.MEMORY_NAMES:
                values = [(0, nodes.memory_parameters(handle, kind))]
            else:
                raise Unsupported(f"a node of kind {kind}")
            found.append((kind, kernel, how, start))
            pointers += self._pointers(start, values)
            end = max((offset + len(value) for offset, value in values), default=0)
            blob += bytes((end + 63) // 64 * 64)
            for offset, value in values:
                blob[start + offset : start + offset + len(value)] = value
        links = [
            (number[source], number[target], int.from_bytes(kind, "little"))
            for source, target, kind in nodes.edges(graph)
        ]
        rows = {"nodes": found, "pointers": pointers, "attributes": attributes, "edges": links}
        arrays = {part: np.array(each, PARTS[part]) for part, each in rows.items()}
        return arrays | {"blob": np.frombuffer(bytes(blob), np.uint8)}

    def _pointers(self, start: int, values: Values) -> Iterator[tuple[int, int, int]]:
        for offset, value in values:
            if offset % 8:
                continue
            for index, word in enumerate(memoryview(value)[: len(value) // 8 * 8].cast("Q")):
                if 1 << 20 <= word < 1 << 57:  # may be an address
                    memory = bisect.bisect_right(self._starts, word) - 1
                    if memory >= 0 and word < self._known[memory][1]:
                        yield start + offset + 8 * index, memory, word - self._starts[memory]
                    elif not status("cuPointerGetAttribute", ctypes.byref(_Z(0)), 2, word):
                        raise Unsupported("a pointer into memory without a name")

    def _changed(self, index: int, node: int, kernel: int) -> Iterator[tuple[int, int, bytes]]:
        """The attributes that a new node would not have."""
        found, defaults = _attributes(node), self._defaults[kernel]
        if found[CLUSTER] == defaults[CLUSTER]:
            del found[CLUSTER_SCHEDULING]  # each captured node has it
        for attribute, value in found.items():
            if value is not None and value != defaults[attribute]:
                yield index, attribute, value


def write(path: Path, header: Mapping[str, Any], graphs: Mapping[int, Arrays]) -> None:
    """The header as JSON, and each part of all graphs: arrays of NumPy."""
    lengths = {part: [len(each[part]) for each in graphs.values()] for part in PARTS}
    text = json.dumps({**header, "sizes": [*graphs], "lengths": lengths}).encode()
    parts = [np.concatenate([each[part] for each in graphs.values()]) for part in PARTS]
    with path.open("wb") as file:
        for each in (np.frombuffer(text, np.uint8), *parts):
            np.save(file, each)
        file.flush()
        os.fsync(file.fileno())
        # So that the first process to read it finds no cache.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(path: Path) -> tuple[dict[str, Any], dict[int, Arrays]]:
    """The header, and the graphs by size."""
    with path.open("rb") as file:
        text, *parts = (np.load(file) for _ in (None, *PARTS))
    header = json.loads(text.tobytes())
    ends = [np.cumsum(header["lengths"][part])[:-1] for part in PARTS]
    graphs = zip(*map(np.split, parts, ends), strict=True)
    arrays = (dict(zip(PARTS, each, strict=True)) for each in graphs)
    return header, dict(zip(header["sizes"], arrays, strict=True))


def compiled() -> Any:
    """build.c, by the compiler that setuptools takes."""
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
    with tempfile.TemporaryDirectory() as folder:
        files = "-o", f"{folder}/build.so", str(Path(__file__).with_name("build.c"))
        subprocess.run([*compiler.split(), "-O2", "-shared", "-fPIC", *files], check=True)
        return ctypes.CDLL(files[1]).make


class Builder:
    """Builds graphs by build.c, from any thread. `bases` are the addresses of the memories."""

    def __init__(self, code: Any, kernels: Any, handles: Sequence[int], bases: Any) -> None:
        self._code = code
        counts = [len(each["layout"]) for each in kernels]
        first = np.cumsum([0, *counts])[:-1]
        fields = [("handle", "u8"), ("first", "u4"), ("count", "u4")]
        functions = np.array([*zip(handles, first, counts, strict=True)], fields)
        offsets = np.array([at for each in kernels for at, _ in each["layout"]], np.uint32)
        self._tables = functions, offsets, np.array(bases, np.uint64)
        self._context = _P()
        call("cuCtxGetCurrent", ctypes.byref(self._context))
        for handle, kernel in zip(handles, kernels, strict=True):
            if handle and kernel["shared"] > 48 << 10:
                # The most dynamic shared memory: more must be allowed.
                call("cuFuncSetAttribute", handle, 8, kernel["shared"])

    def is_complete(self, saved: Arrays) -> bool:
        """Whether all kernels and memories of a graph are here."""
        functions, _, bases = self._tables
        used = saved["nodes"]["kernel"][saved["nodes"]["kind"] == nodes.KERNEL]
        return bool(functions["handle"][used].all() and bases[saved["pointers"]["memory"]].all())

    def build(self, saved: Arrays) -> tuple[int, float, float]:
        """The executable; seconds of its nodes and edges, and of its instantiation."""
        parts = [saved[part].ctypes.data for part in PARTS]
        counts = [len(saved[part]) for part in PARTS if part != "blob"]
        tables = [each.ctypes.data for each in self._tables]
        graph = np.array([*parts, *counts, *tables, self._context.value], np.uint64)
        made, executable, began = _P(), _P(), time.perf_counter()
        check("building a graph", self._code(graph.ctypes, ctypes.byref(made)))
        linked = time.perf_counter()
        call("cuGraphInstantiateWithFlags", ctypes.byref(executable), made, 0)
        call("cuGraphDestroy", made)
        return executable.value or 0, linked - began, time.perf_counter() - linked
