"""`GraphPool`: the memory, the capture stream and the step counter that graphs share."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Token
from threading import get_ident
from typing import Any

from graphrt.core.context import ForwardContext
from graphrt.core.errors import PoolBusyError, PoolClosedError
from graphrt.core.lookup import resolve_platform
from graphrt.core.platform import Capability, Platform

# The one thing that is process-wide, because the device is: two captures on one device at the
# same time see each other's work, whoever they belong to.
_capture_locks: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)


class GraphPool:
    """Memory that graphs share when they never run concurrently: sizes, pieces, target and draft.

    A replay may overwrite the outputs of any other graph in the pool, so outputs are valid until
    the next step. `generation` counts the steps. Use from two threads at once raises
    `PoolBusyError`; replays from two streams are ordered by an event.
    """

    def __init__(self, platform: Platform | str | None = None) -> None:
        self.platform = resolve_platform(platform)
        self.memory: Any = self.platform.new_memory()
        self.stream: Any = self.platform.new_stream()
        self.generation = 0
        self.closed = False
        # The wrapper's replay path reads and writes the following directly.
        self.owner: int | None = None
        self.step: Token[ForwardContext | None] | None = None
        self.has_streams = Capability.STREAMS in self.platform.capabilities
        self._step_context: ForwardContext | None = None
        self._step_thread = 0
        self._last_stream_id: int | None = None
        self._last_stream: Any = None

    def enter_step(self, context: ForwardContext, thread: int) -> None:
        """Count a new step of several pieces; raises `PoolBusyError` inside another thread's."""
        self.leave_step(thread)
        self.step = context.token
        self._step_context = context
        self._step_thread = thread
        self.generation += 1

    def leave_step(self, thread: int) -> None:
        """Forget the step of several pieces; raises `PoolBusyError` if another thread is in it."""
        context = self._step_context
        if (
            context is not None
            and context.token is not None
            and context.token is self.step
            and self._step_thread != thread
        ):
            raise self.busy_error()
        self.step = None
        self._step_context = None

    def order_streams(self) -> None:
        """Make the current stream wait for the one that replayed last, if that is another."""
        current = self.platform.current_stream_id()
        if current != self._last_stream_id:
            if self._last_stream_id is not None:
                self.platform.order_after(self._last_stream)
            self._last_stream_id = current
            self._last_stream = self.platform.current_stream()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Hold the device's capture lock and this pool, with the capture stream current."""
        self.check_open()
        thread = get_ident()
        with _capture_locks[self.platform.device_type]:
            owner = self.owner
            if owner is not None and owner != thread:
                raise self.busy_error()
            self.owner = thread
            try:
                with self.platform.on_stream(self.stream):
                    yield
            finally:
                self.owner = owner

    def allocate(self) -> Any:
        """A context in which this thread's allocations come from the pool."""
        return self.platform.allocate_in(self.memory)

    def bytes(self) -> int | None:
        """Bytes the pool holds from the device, where that can be told."""
        return None if self.closed else self.platform.memory_bytes(self.memory)

    def close(self) -> None:
        """Give the memory back. All graphs of the pool must have been cleared before."""
        if not self.closed:
            self.closed = True
            self.step = self._step_context = None
            with _capture_locks[self.platform.device_type]:
                self.platform.release_memory(self.memory)

    def check_open(self) -> None:
        """Raise `PoolClosedError` after `close()`."""
        if self.closed:
            raise PoolClosedError(
                "the graph pool is closed",
                expected="an open pool",
                advice="create a new GraphPool, or call runner.recapture() before using it again",
            )

    def busy_error(self) -> PoolBusyError:
        return PoolBusyError(
            "two threads use one graph pool at the same time",
            got=f"thread {get_ident()} while thread {self.owner or self._step_thread} is in a step",
            expected="one thread at a time",
            advice="give each thread a GraphPool of its own",
        )
