"""What the CUDA driver knows about captures and graphs and `torch` does not ask it."""

from __future__ import annotations

import ctypes
import functools

from graphrt.core.errors import GraphRTError, MissingCapabilityError

_THREAD_LOCAL = 1
_INVALIDATED = 2


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:  # ROCm and Windows: no driver under this name, and the callers do without it
        return None


def capture_is_invalidated(stream: int) -> bool:
    """Whether the capture open on `stream` has failed already and can only be dropped."""
    library = _library()
    status = ctypes.c_int(0)
    if library is None or library.cuStreamIsCapturing(_pointer(stream), ctypes.byref(status)):
        return False
    return status.value == _INVALIDATED


def captured_nodes(stream: int) -> int | None:
    """How many nodes the capture open on `stream` has; None if that cannot be told."""
    if _library() is None:
        return None
    graph = capture_dependencies(stream)[0]
    return node_count(graph) if graph else None


def capture_dependencies(stream: int) -> tuple[int, list[int]]:
    """The template that `stream` is being captured into, and the nodes its next work waits for.

    (0, []) if it is not being captured.
    """
    status, graph = ctypes.c_int(0), ctypes.c_void_p()
    nodes, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t(0)
    failed = _need().cuStreamGetCaptureInfo_v2(
        _pointer(stream),
        ctypes.byref(status),
        None,
        ctypes.byref(graph),
        ctypes.byref(nodes),
        ctypes.byref(count),
    )
    if failed or not graph.value:
        return 0, []
    return graph.value, [nodes[place] or 0 for place in range(count.value)]


def restart_capture(stream: int) -> bool:
    """Drop what `stream` captures, be it valid or not, and begin an empty capture instead."""
    library = _library()
    if library is None:
        return False
    end_capture(stream)
    return bool(library.cuStreamBeginCapture_v2(_pointer(stream), _THREAD_LOCAL) == 0)


def end_capture(stream: int) -> None:
    """End the capture on `stream`, if there is one, and destroy what it recorded."""
    library = _library()
    if library is None:
        return
    graph = ctypes.c_void_p()
    # An invalidated or absent capture returns its error here, and that is what is dropped.
    library.cuStreamEndCapture(_pointer(stream), ctypes.byref(graph))
    if graph.value:
        library.cuGraphDestroy(graph)


# Templates and executables ---------------------------------------------------------------------


def available() -> bool:
    """Whether the driver can be asked: not on ROCm."""
    return _library() is not None


def clone_graph(graph: int) -> int:
    """A copy of a template, which lives until `destroy_graph`."""
    copy = ctypes.c_void_p()
    _check("cuGraphClone", _need().cuGraphClone(ctypes.byref(copy), _pointer(graph)))
    assert copy.value is not None
    return copy.value


def destroy_graph(graph: int) -> None:
    """Destroy a copy that `clone_graph` made."""
    _check("cuGraphDestroy", _need().cuGraphDestroy(_pointer(graph)))


def update_executable(executable: int, graph: int) -> bool:
    """Give `executable` the parameters of the template `graph`; False if the driver refuses.

    Launches that are enqueued already keep their parameters, and a refused update changes none.
    """
    info = _UpdateResult()
    status = _need().cuGraphExecUpdate_v2(_pointer(executable), _pointer(graph), ctypes.byref(info))
    return bool(status == 0)


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


def node_count(graph: int) -> int:
    """How many nodes a template has."""
    count = ctypes.c_size_t(0)
    status = _need().cuGraphGetNodes(_pointer(graph), None, ctypes.byref(count))
    _check("cuGraphGetNodes", status)
    return count.value


def nodes(graph: int) -> list[int]:
    """The nodes of a template in the order in which they were added."""
    count = ctypes.c_size_t(node_count(graph))
    if not count.value:
        return []  # arrays of no length are refused
    found = (ctypes.c_void_p * count.value)()
    status = _need().cuGraphGetNodes(_pointer(graph), found, ctypes.byref(count))
    _check("cuGraphGetNodes", status)
    return [node or 0 for node in found]


def edges(graph: int) -> list[tuple[int, int, bytes]]:
    """The edges of a template: from, to, and the bytes that say of which kind each is."""
    count = ctypes.c_size_t(0)
    ask = _need().cuGraphGetEdges_v2
    _check("cuGraphGetEdges", ask(_pointer(graph), None, None, None, ctypes.byref(count)))
    if not count.value:
        return []  # arrays of no length are refused
    sources = (ctypes.c_void_p * count.value)()
    targets = (ctypes.c_void_p * count.value)()
    kinds = (ctypes.c_char * 8 * count.value)()
    _check("cuGraphGetEdges", ask(_pointer(graph), sources, targets, kinds, ctypes.byref(count)))
    return [
        (source or 0, target or 0, bytes(kind))
        for source, target, kind in zip(sources, targets, kinds, strict=True)
    ]


def node_type(node: int) -> int:
    """What a node does (CUgraphNodeType)."""
    kind = ctypes.c_int(-1)
    _check("cuGraphNodeGetType", _need().cuGraphNodeGetType(_pointer(node), ctypes.byref(kind)))
    return kind.value


def kernel_parameters(node: int) -> KernelParameters:
    """How the kernel of a node is launched."""
    found = KernelParameters()
    status = _need().cuGraphKernelNodeGetParams_v2(_pointer(node), ctypes.byref(found))
    _check("cuGraphKernelNodeGetParams", status)
    return found


def kernel_attribute(node: int, attribute: int) -> bytes | None:
    """An attribute of a kernel node (CUlaunchAttributeID); None if the driver does not tell."""
    value = (ctypes.c_char * 64)()
    status = _need().cuGraphKernelNodeGetAttribute(_pointer(node), attribute, value)
    return None if status else bytes(value)


def function_of(parameters: KernelParameters) -> int | None:
    """The function that a kernel node launches; None if the driver does not tell."""
    if parameters.function:
        return int(parameters.function)
    # A kernel of a library (CUkernel) has a function in each context.
    function = ctypes.c_void_p()
    status = _need().cuKernelGetFunction(ctypes.byref(function), _pointer(parameters.kernel))
    return None if status else function.value


def function_name(function: int) -> str | None:
    """The (mangled) name of a function; None if the driver does not tell."""
    name = ctypes.c_char_p()
    status = _need().cuFuncGetName(ctypes.byref(name), _pointer(function))
    return None if status or name.value is None else name.value.decode(errors="replace")


def function_attribute(function: int, attribute: int) -> int | None:
    """An attribute of a function (CUfunction_attribute); None if the driver does not tell."""
    value = ctypes.c_int(0)
    status = _need().cuFuncGetAttribute(ctypes.byref(value), attribute, _pointer(function))
    return None if status else value.value


def _need() -> ctypes.CDLL:
    library = _library()
    if library is None:
        raise MissingCapabilityError(
            "this needs the CUDA driver library",
            got="no libcuda.so.1",
            expected="an NVIDIA driver on Linux",
        )
    return library


def _check(call: str, status: int) -> None:
    if status:
        raise DriverError(f"the CUDA driver refused {call}", got=f"CUresult {status}")


class DriverError(GraphRTError):
    """A call of the CUDA driver failed."""


def _pointer(handle: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(handle)
