"""Templates, their nodes, and the executables made of them, by the CUDA driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from graphrt.cuda.driver.api import check, need, node_count, pointer

_INVALID_VALUE = 1
_OUT_OF_MEMORY = 2
_AUTO_FREE = 1
_MEMORY_NAMES = {1: "Memcpy", 2: "Memset"}  # CUgraphNodeType


def destroy_graph(graph: int) -> None:
    """Destroy a template that no graph of torch owns."""
    check("cuGraphDestroy", need().cuGraphDestroy(pointer(graph)))


def update_executable(executable: int, graph: int) -> bool:
    """Give `executable` the parameters of the template `graph`; False if the driver refuses.

    Launches that are enqueued already keep their parameters, and a refused update changes none.
    """
    info = _UpdateResult()
    status = need().cuGraphExecUpdate_v2(pointer(executable), pointer(graph), ctypes.byref(info))
    return bool(status == 0)


def can_instantiate(graph: int) -> bool:
    """Whether the driver makes an executable of a template; the one it made is destroyed."""
    executable = ctypes.c_void_p()
    flags = ctypes.c_ulonglong(_AUTO_FREE)  # what torch passes
    library = need()
    if library.cuGraphInstantiateWithFlags(ctypes.byref(executable), pointer(graph), flags):
        return False
    check("cuGraphExecDestroy", library.cuGraphExecDestroy(executable))
    return True


class NodeCalls:
    """The driver's calls that set nodes; each returns a status, 0 for success.

    Every node is set at every step. So handles are ctypes pointers already, and functions are
    looked up once: callers call `need` first, for a context in their thread.
    """

    def __init__(self) -> None:
        library = need()
        self.set_kernel = library.cuGraphExecKernelNodeSetParams_v2
        self._set_template_kernel = library.cuGraphKernelNodeSetParams_v2
        self._set_enabled = library.cuGraphNodeSetEnabled
        self._get_context = library.cuCtxGetCurrent

    def set_memory(self, kind: int, executable: Any, node: Any, parameters: Any) -> int:
        """Set the parameters of a copy or fill node of an executable."""
        context = ctypes.c_void_p()
        check("cuCtxGetCurrent", self._get_context(ctypes.byref(context)))
        call = getattr(need(), f"cuGraphExec{_MEMORY_NAMES[kind]}NodeSetParams")
        return int(call(executable, node, parameters, context))

    def set_enabled(self, executable: Any, node: Any, enabled: bool) -> int:
        """Switch a node of an executable on or off, for coming launches."""
        return int(self._set_enabled(executable, node, int(enabled)))

    def set_template(self, kind: int, node: Any, parameters: Any) -> int:
        """Set the parameters of a node of a template; its executable stays as it is."""
        if kind not in _MEMORY_NAMES:
            return int(self._set_template_kernel(node, parameters))
        return int(getattr(need(), f"cuGraph{_MEMORY_NAMES[kind]}NodeSetParams")(node, parameters))

    def update_whole(self, executable: int, template: int) -> bool:
        return update_executable(executable, template)

    def can_instantiate(self, template: int) -> bool:
        return can_instantiate(template)


def memory_parameters(node: int, kind: int) -> bytes:
    """The parameters of a copy or fill node."""
    # Large enough for either; the rest stays zero.
    parameters = (ctypes.c_char * 256)()
    name = f"cuGraph{_MEMORY_NAMES[kind]}NodeGetParams"
    check(name, getattr(need(), name)(pointer(node), parameters))
    return parameters.raw


def argument_sizes(function: int) -> tuple[int, ...] | None:
    """The bytes of each argument of a kernel; None if the driver does not tell."""
    ask = getattr(need(), "cuFuncGetParamInfo", None)
    offset, size = ctypes.c_size_t(0), ctypes.c_size_t(0)
    sizes: list[int] = []
    while ask is not None:
        index = ctypes.c_size_t(len(sizes))
        status = ask(pointer(function), index, ctypes.byref(offset), ctypes.byref(size))
        if status:
            return tuple(sizes) if status == _INVALID_VALUE else None
        sizes.append(size.value)
    return None


def arguments_of(parameters: KernelParameters, sizes: Sequence[int]) -> list[bytes]:
    """The arguments of a kernel, copied: the driver holds them as long as the node."""
    pointers = ctypes.cast(parameters.arguments, ctypes.POINTER(ctypes.c_void_p))
    return [ctypes.string_at(pointers[index], size) for index, size in enumerate(sizes)]


class _UpdateResult(ctypes.Structure):
    _fields_ = (
        ("result", ctypes.c_int),
        ("error_node", ctypes.c_void_p),
        ("error_from_node", ctypes.c_void_p),
    )


class KernelParameters(ctypes.Structure):
    """How a kernel node is launched (CUDA_KERNEL_NODE_PARAMS)."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


def nodes_of(graph: int) -> list[int]:
    """The nodes of a template in the order in which they were added."""
    count = ctypes.c_size_t(node_count(graph))
    if not count.value:
        return []  # arrays of no length are refused
    nodes = (ctypes.c_void_p * count.value)()
    status = need().cuGraphGetNodes(pointer(graph), nodes, ctypes.byref(count))
    check("cuGraphGetNodes", status)
    return [node or 0 for node in nodes]


def edges(graph: int) -> list[tuple[int, int, bytes]]:
    """The edges of a template: source, target, and the bytes of the edge's kind."""
    count = ctypes.c_size_t(0)
    ask = need().cuGraphGetEdges_v2
    check("cuGraphGetEdges", ask(pointer(graph), None, None, None, ctypes.byref(count)))
    if not count.value:
        return []  # arrays of no length are refused
    sources = (ctypes.c_void_p * count.value)()
    targets = (ctypes.c_void_p * count.value)()
    kinds = (ctypes.c_char * 8 * count.value)()
    check("cuGraphGetEdges", ask(pointer(graph), sources, targets, kinds, ctypes.byref(count)))
    return [
        (source or 0, target or 0, bytes(kind))
        for source, target, kind in zip(sources, targets, kinds, strict=True)
    ]


def is_chain(nodes: Sequence[int]) -> bool:
    """Whether each node waits for the one before it, and for nothing else."""
    ask = need().cuGraphNodeGetDependencies_v2
    for predecessor, node in pairwise(nodes):
        count = ctypes.c_size_t(0)
        check("cuGraphNodeGetDependencies", ask(pointer(node), None, None, ctypes.byref(count)))
        if count.value != 1:
            return False
        dependencies, kind = (ctypes.c_void_p * 1)(), (ctypes.c_char * 8)()
        status = ask(pointer(node), dependencies, kind, ctypes.byref(count))
        check("cuGraphNodeGetDependencies", status)
        if dependencies[0] != predecessor:
            return False
    return True


def node_type(node: int) -> int:
    """What a node does (CUgraphNodeType)."""
    kind = ctypes.c_int(-1)
    check(
        "cuGraphNodeGetType",
        need().cuGraphNodeGetType(pointer(node), ctypes.byref(kind)),
    )
    return kind.value


def kernel_parameters(node: int) -> KernelParameters:
    """How the kernel of a node is launched."""
    parameters = KernelParameters()
    status = need().cuGraphKernelNodeGetParams_v2(pointer(node), ctypes.byref(parameters))
    check("cuGraphKernelNodeGetParams", status)
    return parameters


def kernel_attribute(node: int, attribute: int) -> bytes | None:
    """An attribute of a kernel node (CUlaunchAttributeID); None if the driver does not tell.

    Raises `DriverError` where it has no memory: no attribute would look like another one.
    """
    value = (ctypes.c_char * 64)()
    status = need().cuGraphKernelNodeGetAttribute(pointer(node), attribute, value)
    if status == _OUT_OF_MEMORY:
        check("cuGraphKernelNodeGetAttribute", status)
    return None if status else bytes(value)


def function_of(parameters: KernelParameters) -> int | None:
    """The function that a kernel node launches; None if the driver does not tell."""
    if parameters.function:
        return int(parameters.function)
    # A kernel of a library (CUkernel) has a function in each context.
    function = ctypes.c_void_p()
    status = need().cuKernelGetFunction(ctypes.byref(function), pointer(parameters.kernel))
    return None if status else function.value
