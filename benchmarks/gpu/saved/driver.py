"""Graphs read from the driver, and built by it: nodes, edges, attributes, parameters."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from graphrt.cuda.driver.nodes import (
    KERNEL,
    MEMORY_NAMES,
    KernelParameters,
    edges,
    function_of,
    kernel_attribute,
    kernel_parameters,
    memory_parameters,
    node_type,
    nodes_of,
)

EMPTY = 5
MEMORY_BYTES = 256
CLUSTER, CLUSTER_SCHEDULING = 4, 5
ATTRIBUTES = (1, 2, CLUSTER, CLUSTER_SCHEDULING, 8, 9, 10, 11, 14)
"""CUlaunchAttributeID of a kernel node; programmatic launches are edges of a kind of their own."""
TRAITS = (0, 1, 2, 3, 4, 5, 6)
"""CUfunction_attribute: threads, shared, constant and local bytes, registers, PTX, binary."""
PARTS = (
    "kinds", "kernels", "launch", "starts", "arguments", "blob", "relocations", "attribute_of",
    "attributes", "edges", "edge_kinds",
)  # fmt: skip
"""The arrays of a graph."""
LEAST, MOST = 1 << 20, 1 << 57
PARAMETERS = np.dtype(
    {
        "names": ["function", "launch", "arguments"],
        "formats": ["u8", ("u4", 7), "u8"],
        "offsets": [0, 8, 40],
        "itemsize": ctypes.sizeof(KernelParameters),
    }
)
_P, _Z = ctypes.c_void_p, ctypes.c_size_t
_LARGE_SHARED, _MAX_DYNAMIC = 48 << 10, 8


class Driver:
    """`driver("cuGraphCreate", ...)` calls the driver, and raises where that fails."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        # Called for each node.
        self.add_kernel: Any = self.library["cuGraphAddKernelNode_v2"]  # an object of its own
        self.add_kernel.argtypes = _P, _P, _P, _Z, _P

    def status(self, name: str, *arguments: Any) -> int:
        # Numbers are as wide as addresses: x86-64 and Arm pass both in registers.
        given = [_P(each) if isinstance(each, int) else each for each in arguments]
        return int(getattr(self.library, name)(*given))

    def __call__(self, name: str, *arguments: Any) -> None:
        status = self.status(name, *arguments)
        if status:
            raise RuntimeError(f"{name}: CUresult {status}")

    def handle(self, name: str, *arguments: Any) -> int | None:
        """The handle that a function returns first; None where it fails."""
        result = _P()
        failed = self.status(name, ctypes.byref(result), *arguments)
        return None if failed else result.value

    def is_device_memory(self, word: int) -> bool:
        kind = ctypes.c_uint(0)
        return not self.status("cuPointerGetAttribute", ctypes.byref(kind), 2, word)

    def name_of(self, function: int) -> str:
        name = ctypes.c_char_p()
        self("cuFuncGetName", ctypes.byref(name), function)
        return (name.value or b"").decode()

    def traits(self, function: int) -> list[int]:
        value, found = ctypes.c_int(0), []
        for trait in TRAITS:
            self("cuFuncGetAttribute", ctypes.byref(value), trait, function)
            found.append(value.value)
        return found

    def layout(self, function: int) -> list[tuple[int, int]]:
        """Offset and bytes of each argument."""
        offset, size, found = _Z(0), _Z(0), []
        at = ctypes.byref(offset), ctypes.byref(size)
        while not self.status("cuFuncGetParamInfo", function, len(found), *at):
            found.append((offset.value, size.value))
        return found

    def siblings(self, launch: KernelParameters) -> Iterator[int]:
        """All functions of the module, or library, that a launched kernel comes from."""
        count = ctypes.c_uint(0)
        if launch.kernel:
            library = self.handle("cuKernelGetLibrary", launch.kernel)
            self("cuLibraryGetKernelCount", ctypes.byref(count), library)
            kernels = (_P * count.value)()
            self("cuLibraryEnumerateKernels", kernels, count, library)
            yield from filter(None, (self.handle("cuKernelGetFunction", each) for each in kernels))
            return
        module = self.handle("cuFuncGetModule", launch.function)
        if module is None:
            return
        self("cuModuleGetFunctionCount", ctypes.byref(count), module)
        functions = (_P * count.value)()
        self("cuModuleEnumerateFunctions", functions, count, module)
        yield from filter(None, functions)


class Unsupported(Exception):
    """A graph that cannot be written to a file."""


def launches(graph: int) -> list[KernelParameters]:
    """How each kernel of a graph is launched."""
    return [kernel_parameters(node) for node in nodes_of(graph) if node_type(node) == KERNEL]


def _arguments(
    launch: KernelParameters, layout: Sequence[tuple[int, int]]
) -> list[tuple[int, bytes]]:
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
    size = ctypes.c_uint64.from_address(given[2]).value
    buffer = ctypes.string_at(given[1], size)
    return [(offset, buffer[offset : offset + size]) for offset, size in layout]


class Reader:
    """Turns graphs into arrays. `place(word)` is the index of the memory that a word points into,
    and the offset; None if it points into none that has a name."""

    def __init__(
        self,
        driver: Driver,
        place: Callable[[int], tuple[int, int] | None],
        identify: Callable[[int], str],
    ) -> None:
        self.driver, self._place, self._identify = driver, place, identify
        self.kernels: list[dict[str, Any]] = []
        self._index: dict[int, int] = {}
        self._defaults: dict[int, dict[int, bytes | None]] = {}

    def kernel(self, launch: KernelParameters) -> int:
        function = function_of(launch)
        if function is None:
            raise Unsupported("the driver does not tell the function of a kernel")
        if function not in self._index:
            self._index[function] = len(self.kernels)
            self.kernels.append(
                {
                    "name": self.driver.name_of(function),
                    "traits": self.driver.traits(function),
                    "layout": self.driver.layout(function),
                    "origin": self._identify(function),
                }
            )
        return self._index[function]

    def read(self, graph: int) -> dict[str, np.ndarray]:
        """The arrays of a graph. Raises `Unsupported` where something of it has no name."""
        nodes = nodes_of(graph)
        number = {node: index for index, node in enumerate(nodes)}
        kinds, kernels, launch_of, starts, arguments = [], [], [], [], []
        blob, relocations, attributes = bytearray(), [], []
        for index, node in enumerate(nodes):
            kind = node_type(node)
            kinds.append(kind)
            starts.append(len(blob))
            kernels.append(0)
            launch_of.append((0,) * 7)
            if kind == KERNEL:
                launch = kernel_parameters(node)
                kernels[-1] = self.kernel(launch)
                launch_of[-1] = (*launch.grid, *launch.block, launch.shared_bytes)
                layout = self.kernels[kernels[-1]]["layout"]
                values = _arguments(launch, layout)
                arguments += [len(blob) + offset for offset, _ in values]
                attributes += self._attributes(index, node, launch)
            elif kind in MEMORY_NAMES:
                values = [(0, memory_parameters(node, kind))]
            elif kind == EMPTY:
                values = []
            else:
                raise Unsupported(f"a node of kind {kind}")
            name = self.kernels[kernels[-1]]["name"] if kind == KERNEL else MEMORY_NAMES.get(kind)
            relocations += self._relocations(len(blob), values, name)
            end = max((offset + len(value) for offset, value in values), default=0)
            packed = bytearray((end + 63) // 64 * 64)
            for offset, value in values:
                packed[offset : offset + len(value)] = value
            blob += packed
        links = edges(graph)
        ends = [(number[source], number[target]) for source, target, _ in links]
        return {
            "kinds": np.array(kinds, np.uint8),
            "kernels": np.array(kernels, np.uint32),
            "launch": np.array(launch_of, np.uint32).reshape(-1, 7),
            "starts": np.array(starts, np.uint64),
            "arguments": np.array(arguments, np.uint64),
            "blob": np.frombuffer(bytes(blob), np.uint8),
            "relocations": np.array(relocations, np.uint64).reshape(-1, 3),
            "attribute_of": np.array([each[:2] for each in attributes], np.uint32).reshape(-1, 2),
            "attributes": np.frombuffer(b"".join(each[2] for each in attributes), np.uint8),
            "edges": np.array(ends, np.uint32).reshape(-1, 2),
            "edge_kinds": np.frombuffer(b"".join(kind for *_, kind in links), np.uint8),
        }

    def _relocations(
        self, start: int, values: Sequence[tuple[int, bytes]], name: str | None
    ) -> Iterator[tuple[int, int, int]]:
        for offset, value in values:
            if offset % 8:
                continue
            for index, word in enumerate(memoryview(value)[: len(value) // 8 * 8].cast("Q")):
                if not LEAST <= word < MOST:
                    continue
                found = self._place(word)
                if found is not None:
                    yield (start + offset + 8 * index, *found)
                elif self.driver.is_device_memory(word):
                    raise Unsupported(f"{name} has a pointer into memory without a name")

    def _attributes(
        self, index: int, node: int, launch: KernelParameters
    ) -> Iterator[tuple[int, int, bytes]]:
        """Those that a new node would not have."""
        function = function_of(launch) or 0
        if function not in self._defaults:
            graph, fresh = _P(), _P()
            self.driver("cuGraphCreate", ctypes.byref(graph), 0)
            self.driver(
                "cuGraphAddKernelNode_v2", ctypes.byref(fresh), graph, None, 0, ctypes.byref(launch)
            )
            made = fresh.value or 0
            self._defaults[function] = {each: kernel_attribute(made, each) for each in ATTRIBUTES}
            self.driver("cuGraphDestroy", graph)
        found = {each: kernel_attribute(node, each) for each in ATTRIBUTES}
        defaults = self._defaults[function]
        if found[CLUSTER] == defaults[CLUSTER]:
            del found[CLUSTER_SCHEDULING]  # each captured node has it
        for attribute, value in found.items():
            if value is not None and value != defaults[attribute]:
                yield index, attribute, value


class Built:
    """A graph that was built from arrays."""

    def __init__(
        self,
        driver: Driver,
        saved: dict[str, np.ndarray],
        functions: np.ndarray,
        bases: np.ndarray,
    ) -> None:
        """`functions` are the kernels' handles, `bases` the memories' addresses, both uint64."""
        self.driver = driver
        blob, relocations = saved["blob"].copy(), saved["relocations"]
        words = blob.view(np.uint64)
        words[relocations[:, 0] // 8] = bases[relocations[:, 1]] + relocations[:, 2]
        at = blob.ctypes.data
        kinds, kernels = saved["kinds"], saved["kernels"]
        arguments = saved["arguments"] + np.uint64(at)
        counts = np.where(kinds == KERNEL, functions["count"][kernels], 0)
        first = np.concatenate(([0], np.cumsum(counts)[:-1])).astype(np.uint64)
        launch = np.zeros(len(kinds), PARAMETERS)
        launch["function"] = functions["handle"][kernels]
        launch["launch"] = saved["launch"]
        launch["arguments"] = np.uint64(arguments.ctypes.data) + 8 * first
        graph, made = _P(), (_P * max(len(kinds), 1))()
        driver("cuGraphCreate", ctypes.byref(graph), 0)
        context = driver.handle("cuCtxGetCurrent")
        add, nodes = driver.add_kernel, ctypes.addressof(made)
        step, parameters = PARAMETERS.itemsize, launch.ctypes.data
        for index, kind in enumerate(kinds.tolist()):
            node = nodes + 8 * index
            if kind == KERNEL:
                status = add(node, graph, None, 0, parameters + step * index)
                if status:
                    raise RuntimeError(f"cuGraphAddKernelNode: CUresult {status}")
            elif kind == EMPTY:
                driver("cuGraphAddEmptyNode", node, graph, None, 0)
            else:
                name = f"cuGraphAdd{MEMORY_NAMES[kind]}Node"
                driver(name, node, graph, None, 0, at + int(saved["starts"][index]), context)
        values = saved["attributes"]
        for index, (node_index, attribute) in enumerate(saved["attribute_of"].tolist()):
            value = values[64 * index : 64 * index + 64].tobytes()
            driver("cuGraphKernelNodeSetAttribute", made[node_index], attribute, value)
        self._link(graph, np.frombuffer(made, np.uint64), saved)
        executable = _P()
        driver("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, 0)
        driver("cuGraphDestroy", graph)
        self.executable = executable.value

    def _link(self, graph: Any, nodes: np.ndarray, saved: dict[str, np.ndarray]) -> None:
        ends, kinds = saved["edges"], saved["edge_kinds"]
        if len(ends):
            sources, targets = nodes[ends[:, 0]].copy(), nodes[ends[:, 1]].copy()
            pointers = sources.ctypes.data, targets.ctypes.data, kinds.ctypes.data
            self.driver("cuGraphAddDependencies_v2", graph, *pointers, len(ends))


def function_table(kernels: Sequence[dict[str, Any]], handles: Sequence[int | None]) -> np.ndarray:
    """Handle (0 for none) and number of arguments of each kernel."""
    rows = [
        (handle or 0, len(each["layout"])) for each, handle in zip(kernels, handles, strict=True)
    ]
    return np.array(rows, np.dtype([("handle", "u8"), ("count", "u8")]))


def allow_shared(
    driver: Driver, functions: np.ndarray, graphs: Sequence[dict[str, np.ndarray]]
) -> None:
    """Let kernels have as much shared memory as any graph launches them with."""
    most: dict[int, int] = {}
    for saved in graphs:
        large = saved["launch"][:, 6] > _LARGE_SHARED
        for kernel, launch in zip(saved["kernels"][large], saved["launch"][large], strict=True):
            most[int(kernel)] = max(most.get(int(kernel), 0), int(launch[6]))
    for kernel, size in most.items():
        handle = int(functions["handle"][kernel])
        if handle:
            driver("cuFuncSetAttribute", handle, _MAX_DYNAMIC, size)
