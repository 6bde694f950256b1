"""The nodes of templates, and of the executables made of them, by the CUDA driver."""

from __future__ import annotations

import ctypes

from graphrt.cuda.driver.api import call, check, need, node_count, pointer

_INVALID_VALUE = 1
_OUT_OF_MEMORY = 2
_REFUSALS = (_INVALID_VALUE, 801, 910)
"""CUresult of parameters that an executable cannot have: invalid, not supported, not updated."""
# CUgraphNodeType
KERNEL, CHILD, EMPTY = 0, 4, 5
MEMORY_NAMES = {1: "Memcpy", 2: "Memset"}


def destroy_graph(graph: int) -> None:
    """Destroy a template that no graph of torch owns."""
    call("cuGraphDestroy", pointer(graph))


def set_node(executable: int, node: int, kind: int, source: int) -> bool:
    """Give a kernel, copy or fill `node` of an executable the parameters of `source`, a node of the
    same kind in another template; False if the driver refuses. Raises `DriverError` for a failure
    of another kind, such as a lack of memory.

    The driver copies them: `source` may be destroyed then, and launches that are enqueued already
    keep the parameters of before.
    """
    library, into = need(), (pointer(executable), pointer(node))
    if kind == KERNEL:
        name, launch = "cuGraphExecKernelNodeSetParams_v2", kernel_parameters(source)
        status = getattr(library, name)(*into, ctypes.byref(launch))
    else:
        context = ctypes.c_void_p()
        call("cuCtxGetCurrent", ctypes.byref(context))
        name = f"cuGraphExec{MEMORY_NAMES[kind]}NodeSetParams"
        status = getattr(library, name)(*into, memory_parameters(source, kind), context)
    if status in _REFUSALS:
        return False
    check(name, status)
    return True


def memory_parameters(node: int, kind: int) -> bytes:
    """The parameters of a copy or fill node."""
    # Large enough for either; the rest stays zero.
    parameters = (ctypes.c_char * 256)()
    call(f"cuGraph{MEMORY_NAMES[kind]}NodeGetParams", pointer(node), parameters)
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
    call("cuGraphGetNodes", pointer(graph), nodes, ctypes.byref(count))
    return [node or 0 for node in nodes]


def edges(graph: int) -> list[tuple[int, int, bytes]]:
    """The edges of a template: source, target, and the bytes of the edge's kind."""
    count = ctypes.c_size_t(0)
    call("cuGraphGetEdges_v2", pointer(graph), None, None, None, ctypes.byref(count))
    if not count.value:
        return []  # arrays of no length are refused
    sources = (ctypes.c_void_p * count.value)()
    targets = (ctypes.c_void_p * count.value)()
    kinds = (ctypes.c_char * 8 * count.value)()
    call("cuGraphGetEdges_v2", pointer(graph), sources, targets, kinds, ctypes.byref(count))
    return [
        (source or 0, target or 0, bytes(kind))
        for source, target, kind in zip(sources, targets, kinds, strict=True)
    ]


def node_type(node: int) -> int:
    """What a node does (CUgraphNodeType)."""
    kind = ctypes.c_int(-1)
    call("cuGraphNodeGetType", pointer(node), ctypes.byref(kind))
    return kind.value


def kernel_parameters(node: int) -> KernelParameters:
    """How the kernel of a node is launched."""
    parameters = KernelParameters()
    call("cuGraphKernelNodeGetParams_v2", pointer(node), ctypes.byref(parameters))
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


def function_name(function: int) -> str | None:
    """The mangled name of a kernel; None if the driver does not tell, as before CUDA 12.3."""
    ask, name = getattr(need(), "cuFuncGetName", None), ctypes.c_char_p()
    if ask is None or ask(ctypes.byref(name), pointer(function)) or name.value is None:
        return None
    return name.value.decode(errors="replace")


def tools_id(node: int) -> int | None:
    """The number of a node by which profilers call it in each executable of its template; None
    if the driver does not tell, as before CUDA 13.1."""
    ask, number = getattr(need(), "cuGraphNodeGetToolsId", None), ctypes.c_ulonglong(0)
    if ask is None or ask(pointer(node), ctypes.byref(number)):
        return None
    return number.value & 0xFFFFFFFF  # above are the bits of the template


def child_graph(node: int) -> int:
    """The template of a child graph, which its node owns."""
    graph = ctypes.c_void_p()
    call("cuGraphChildGraphNodeGetGraph", pointer(node), ctypes.byref(graph))
    return graph.value or 0
