"""Captures, templates, streams and contexts, by the CUDA driver.

The driver works in the calling thread's current context. A new thread has none until torch first
needs one there. `need()` and `enter_context()` set it: without them a step whose inputs are all on
the host, which begins with a fetch by the driver, would fail in a new thread.
"""

from __future__ import annotations

import ctypes
import functools
import threading

import torch

from graphrt.core.base.errors import GraphRTError, MissingCapabilityError
from graphrt.cuda.private_torch import current_device

INVALID_CONTEXT = 201
_THREAD_LOCAL = 1
_INVALIDATED = 2
_NON_BLOCKING = 1
_POINTER_MAPPED = 13
_threads = threading.local()


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
    if library is None or library.cuStreamIsCapturing(pointer(stream), ctypes.byref(status)):
        return False
    return status.value == _INVALIDATED


def captured_nodes(stream: int) -> int | None:
    """How many nodes the capture open on `stream` has; None without the driver, or a capture."""
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
    failed = need().cuStreamGetCaptureInfo_v2(
        pointer(stream),
        ctypes.byref(status),
        None,
        ctypes.byref(graph),
        ctypes.byref(nodes),
        ctypes.byref(count),
    )
    if failed or not graph.value:
        return 0, []
    return graph.value, [nodes[index] or 0 for index in range(count.value)]


def restart_capture(stream: int) -> None:
    """Drop what `stream` captures, be it valid or not, and begin an empty capture instead."""
    library = _library()
    if library is not None:
        end_capture(stream)
        library.cuStreamBeginCapture_v2(pointer(stream), _THREAD_LOCAL)


def end_capture(stream: int) -> None:
    """End the capture on `stream`, if there is one, and destroy what it recorded."""
    library = _library()
    if library is None:
        return
    graph = ctypes.c_void_p()
    # An invalidated or absent capture returns an error here, which changes nothing.
    library.cuStreamEndCapture(pointer(stream), ctypes.byref(graph))
    if graph.value:
        library.cuGraphDestroy(graph)


def driver_available() -> bool:
    """Whether the driver can be asked: not on ROCm."""
    return _library() is not None


def node_count(graph: int) -> int:
    """How many nodes a template has."""
    count = ctypes.c_size_t(0)
    call("cuGraphGetNodes", pointer(graph), None, ctypes.byref(count))
    return count.value


def begin_capture(stream: int) -> None:
    """Begin a capture of this thread on `stream`, which torch knows nothing of."""
    call("cuStreamBeginCapture_v2", pointer(stream), _THREAD_LOCAL)


def finish_capture(stream: int) -> int:
    """End the capture on `stream`; its template lives until `destroy_graph`."""
    graph = ctypes.c_void_p()
    call("cuStreamEndCapture", pointer(stream), ctypes.byref(graph))
    assert graph.value is not None
    return graph.value


def upload(executable: int, stream: int) -> None:
    """Bring an executable graph to the device, on `stream`: else its first launch does."""
    call("cuGraphUpload", pointer(executable), pointer(stream))


def new_stream(priority: int) -> int:
    """A stream of the current device, which no work on the legacy default stream waits for."""
    stream = ctypes.c_void_p()
    call("cuStreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, priority)
    assert stream.value is not None
    return stream.value


def allocation_of(address: int) -> tuple[int, int] | None:
    """The first byte and the end of the device allocation that has `address`; None if none has."""
    start, size = ctypes.c_ulonglong(0), ctypes.c_size_t(0)
    failed = need().cuMemGetAddressRange_v2(
        ctypes.byref(start), ctypes.byref(size), ctypes.c_ulonglong(address)
    )
    return None if failed else (start.value, start.value + size.value)


def is_mapped(address: int) -> bool:
    """Whether there is memory at an address of a device; True where the driver cannot be asked."""
    if _library() is None:
        return True
    mapped = ctypes.c_ulonglong(0)
    failed = need().cuPointerGetAttribute(
        ctypes.byref(mapped), _POINTER_MAPPED, ctypes.c_ulonglong(address)
    )
    return not failed and bool(mapped.value)


def need() -> ctypes.CDLL:
    """The driver library, in a thread that has a context; raises `MissingCapabilityError` where
    there is none."""
    library = _library()
    if library is None:
        raise MissingCapabilityError(
            "this needs the CUDA driver library",
            got="no libcuda.so.1",
            expected="an NVIDIA driver on Linux",
            advice='install the driver, or platform="cpu"',
        )
    if not hasattr(_threads, "entered"):
        enter_context(library)
        _threads.entered = True
    return library


def enter_context(library: ctypes.CDLL) -> None:
    """Give this thread the context of torch's current device, unless it has one.

    Code that keeps a function of the driver, to call it at every step, leaves `need()` out. It
    calls this when the function returns `INVALID_CONTEXT`.
    """
    context = ctypes.c_void_p()
    failed = library.cuCtxGetCurrent(ctypes.byref(context))
    if failed or not context.value:
        # torch's initialisation is also what starts the driver.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        primary = _primary_context(library, current_device())
        check("cuCtxSetCurrent", library.cuCtxSetCurrent(pointer(primary)))


def _primary_context(library: ctypes.CDLL, index: int) -> int:
    """The context that torch uses on a device; like torch, graphrt never releases it."""
    device, context = ctypes.c_int(0), ctypes.c_void_p()
    check("cuDeviceGet", library.cuDeviceGet(ctypes.byref(device), index))
    retain = library.cuDevicePrimaryCtxRetain
    check("cuDevicePrimaryCtxRetain", retain(ctypes.byref(context), device))
    assert context.value is not None
    return context.value


def call(function: str, *arguments: object) -> None:
    """Call a function of the driver; raises `DriverError` unless it succeeds."""
    check(function, getattr(need(), function)(*arguments))


def check(function: str, status: int) -> None:
    """Raise `DriverError` unless a call of a function has succeeded."""
    if status:
        raise DriverError(f"the CUDA driver refused {function}", got=f"CUresult {status}")


class DriverError(GraphRTError):
    """A call of the CUDA driver failed."""

    usual_advice = (
        "look CUresult up in cuda.h; run once with CUDA_LAUNCH_BLOCKING=1, which names the call "
        "that failed first"
    )


def pointer(handle: int) -> ctypes.c_void_p:
    """A handle as an argument."""
    return ctypes.c_void_p(handle)
