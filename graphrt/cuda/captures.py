"""CUDA captures: begun, ended, or taken back so that the next one works."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.thread_mode import unseen
from graphrt.core.device.captures import Captures, OpenCapture, nested_capture
from graphrt.core.device.contract import EndedCaptureError
from graphrt.core.device.pool_memory import captured_pool
from graphrt.core.replay.recording import drawn_from
from graphrt.cuda.driver.api import (
    capture_is_invalidated,
    captured_nodes,
    end_capture,
    restart_capture,
)
from graphrt.cuda.driver.forks import ForkWatch
from graphrt.cuda.memory import GraphMemory
from graphrt.cuda.private_torch import current_device
from graphrt.cuda.update.tasks import Tasks

_GENERATOR_BYTES = 2048
"""More than the two blocks of 512 bytes that a generator's seed and offset take."""


class CudaCaptures(Captures[GraphMemory]):
    """Begins, ends and takes back captures; has the stream and the memory of each open one."""

    def __init__(self, tasks: Tasks) -> None:
        super().__init__()
        self._tasks = tasks
        # Finds side streams that the forward did not join.
        self._forks = ForkWatch()
        # graph -> the memory it was captured in
        self._homes: WeakKeyDictionary[Any, GraphMemory] = WeakKeyDictionary()

    def homes_of(self, graphs: Iterable[Any]) -> list[GraphMemory]:
        """The memory that these graphs were captured in, each once."""
        homes = {id(home): home for graph in graphs if (home := self._homes.get(graph)) is not None}
        return list(homes.values())

    def abort(self, graph: Any) -> None:
        self._forks.end()
        self._tasks.abort(graph)
        super().abort(graph)

    def _stream_to_capture(self) -> torch.cuda.Stream:
        if torch.cuda.is_current_stream_capturing():
            raise nested_capture("torch.cuda.graph")
        return torch.cuda.current_stream()

    def _begin(self, graph: Any, opened: OpenCapture[GraphMemory]) -> None:
        # "global" would fail this capture for an unsafe call of any other thread. Under a dispatch
        # mode torch would make Python tensors of the generator's seed and offset.
        unseen(partial(_begin, graph, opened.handle))
        opened.memory.add(graph)
        opened.memory.capturing_on(opened.stream)
        self._homes[graph] = opened.memory
        self._forks.begin()

    def _end(self, graph: Any, opened: OpenCapture[GraphMemory]) -> bool:
        stream = opened.stream.cuda_stream
        waits = self._forks.end()
        # capture_end() of an invalidated capture leaves the allocator in a state that depends on
        # the version of torch; abort() leaves a clean one.
        if capture_is_invalidated(stream):
            raise EndedCaptureError.of("an invalidated capture at its end")
        self._forks.check_joined(stream, waits)
        if captured_nodes(stream) != 0:
            graph.capture_end()
            return True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "The CUDA Graph is empty"
            graph.capture_end()
        return False

    def _drop_empty(self, graph: Any, opened: OpenCapture[GraphMemory]) -> None:
        opened.memory.keep_empty(graph)

    @undoing
    def _take_back(self, undo: Undo, graph: Any, opened: OpenCapture[GraphMemory]) -> None:
        if captured_pool(graph) is not None:
            graph.reset()  # the capture was ended, and a later call failed
            return
        undo.later(partial(torch.cuda.set_stream, torch.cuda.current_stream()))
        torch.cuda.set_stream(opened.stream)
        if not opened.begun and not torch.cuda.is_current_stream_capturing():
            # The begin failed, or an interrupt came before it: there is no capture to end.
            if opened.memory.stop_routing():
                opened.memory.abandon(graph)
            return
        clean = _end_empty(graph, opened.stream.cuda_stream)
        undo.now()
        graph.reset()
        if not clean:
            opened.memory.abandon(graph)


def _begin(graph: Any, handle: Any) -> None:
    for generator in drawn_from.get():
        if generator.device.type == "cuda":
            graph.register_generator_state(generator)
    graph.capture_begin(handle, capture_error_mode="thread_local")


def check_room() -> None:
    """Raise the allocator's error before a capture begins, if a generator's state finds no room.

    capture_begin() allocates that state after it has registered the graph. If it failed there, the
    graph's destructor would raise, which ends the process. The block that this leaves to it is not
    of `GraphPool(around_memory=)`: its pages stay.
    """
    allocated = torch.cuda.caching_allocator_alloc(_GENERATOR_BYTES)
    torch.cuda.caching_allocator_delete(allocated)  # type: ignore[no-untyped-call]


class _Threads(threading.local):
    with_cublas: frozenset[int] = frozenset()
    """The devices for which a thread has a handle of cuBLAS."""


_threads = _Threads()


def set_up_cublas() -> None:
    """Make this thread's handle of cuBLAS for the current device, before a capture that may be the
    first to need one: cuBLAS cannot be set up inside, and where it has failed to, some of its
    routines fail for good (`torch.linalg.qr` of batches)."""
    device = current_device()
    if device not in _threads.with_cublas and not torch.cuda.is_current_stream_capturing():
        # torch gives the handle a workspace for the stream, here one that no pool has.
        with torch.cuda.stream(torch.cuda.default_stream()):
            unseen(torch.cuda.current_blas_handle)
        _threads.with_cublas |= {device}


def _end_empty(graph: Any, stream: int) -> bool:
    """End a failed capture as an empty one; False if the allocators stay routed into the pool.

    torch undoes what capture_begin() did (routing of both allocators, generators, shares of the
    pool) only where capture_end() succeeds, and that of an invalidated capture fails.
    """
    restart_capture(stream)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "The CUDA Graph is empty"
            graph.capture_end()
        return True
    except RuntimeError:
        return False
    finally:
        end_capture(stream)
