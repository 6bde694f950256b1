"""What the CUDA driver knows about captures and `torch` does not ask it."""

from __future__ import annotations

import ctypes
import functools

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
    library = _library()
    if library is None:
        return None
    status, graph, count = ctypes.c_int(0), ctypes.c_void_p(), ctypes.c_size_t(0)
    failed = library.cuStreamGetCaptureInfo_v2(
        _pointer(stream), ctypes.byref(status), None, ctypes.byref(graph), None, None
    )
    if failed or library.cuGraphGetNodes(graph, None, ctypes.byref(count)):
        return None
    return count.value


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


def _pointer(stream: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(stream)
