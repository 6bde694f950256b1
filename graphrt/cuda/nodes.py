"""Captured templates, their nodes, and the executables made of them, through the driver."""

from __future__ import annotations

import ctypes

from graphrt.cuda.driver import check, need, node_count, pointer

_INVALID_VALUE = 1
_MEMCPY = 1


def clone_graph(graph: int) -> int:
    """A copy of a template, which lives until `destroy_graph`."""
    copy = ctypes.c_void_p()
    check("cuGraphClone", need().cuGraphClone(ctypes.byref(copy), pointer(graph)))
    assert copy.value is not None
    return copy.value


def destroy_graph(graph: int) -> None:
    """Destroy a copy that `clone_graph` made."""
    check("cuGraphDestroy", need().cuGraphDestroy(pointer(graph)))


def update_executable(executable: int, graph: int) -> bool:
    """Give `executable` the parameters of the template `graph`; False if the driver refuses.

    Launches that are enqueued already keep their parameters, and a refused update changes none.
    """
    info = _UpdateResult()
    status = need().cuGraphExecUpdate_v2(pointer(executable), pointer(graph), ctypes.byref(info))
    return bool(status == 0)


def set_kernel(executable: int, node: int, parameters: KernelParameters) -> bool:
    """Give the kernel of `node` other parameters for coming launches; False if refused."""
    return not need().cuGraphExecKernelNodeSetParams_v2(
        pointer(executable), pointer(node), ctypes.byref(parameters)
    )


def set_memory(executable: int, node: int, source: int, kind: int) -> bool:
    """Give a copy (kind 1) or fill (kind 2) node what the node `source` does; False if refused."""
    library = need()
    context = ctypes.c_void_p()
    check("cuCtxGetCurrent", library.cuCtxGetCurrent(ctypes.byref(context)))
    # Large enough for either kind of parameters.
    parameters = (ctypes.c_char * 512)()
    name = "Memcpy" if kind == _MEMCPY else "Memset"
    get = getattr(library, f"cuGraph{name}NodeGetParams")
    put = getattr(library, f"cuGraphExec{name}NodeSetParams")
    check(f"cuGraph{name}NodeGetParams", get(pointer(source), parameters))
    return not put(pointer(executable), pointer(node), parameters, context)


def argument_bytes(function: int, parameters: KernelParameters) -> list[bytes] | None:
    """The arguments of a kernel as bytes; None if the driver does not tell their sizes."""
    if not parameters.arguments:
        return None
    pointers = ctypes.cast(parameters.arguments, ctypes.POINTER(ctypes.c_void_p))
    offset, size = ctypes.c_size_t(0), ctypes.c_size_t(0)
    ask = getattr(need(), "cuFuncGetParamInfo", None)
    found: list[bytes] = []
    while ask is not None:
        place = len(found)
        status = ask(
            pointer(function),
            ctypes.c_size_t(place),
            ctypes.byref(offset),
            ctypes.byref(size),
        )
        if status:
            return found if status == _INVALID_VALUE else None
        found.append(ctypes.string_at(pointers[place], size.value))
    return None


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
    found = (ctypes.c_void_p * count.value)()
    status = need().cuGraphGetNodes(pointer(graph), found, ctypes.byref(count))
    check("cuGraphGetNodes", status)
    return [node or 0 for node in found]


def edges(graph: int) -> list[tuple[int, int, bytes]]:
    """The edges of a template: from, to, and the bytes that say of which kind each is."""
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
    found = KernelParameters()
    status = need().cuGraphKernelNodeGetParams_v2(pointer(node), ctypes.byref(found))
    check("cuGraphKernelNodeGetParams", status)
    return found


def kernel_attribute(node: int, attribute: int) -> bytes | None:
    """An attribute of a kernel node (CUlaunchAttributeID); None if the driver does not tell."""
    value = (ctypes.c_char * 64)()
    status = need().cuGraphKernelNodeGetAttribute(pointer(node), attribute, value)
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
    """The (mangled) name of a function; None if the driver does not tell."""
    name = ctypes.c_char_p()
    status = need().cuFuncGetName(ctypes.byref(name), pointer(function))
    return None if status or name.value is None else name.value.decode(errors="replace")


def function_attribute(function: int, attribute: int) -> int | None:
    """An attribute of a function (CUfunction_attribute); None if the driver does not tell."""
    value = ctypes.c_int(0)
    status = need().cuFuncGetAttribute(ctypes.byref(value), attribute, pointer(function))
    return None if status else value.value
