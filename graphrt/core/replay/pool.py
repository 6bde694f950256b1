"""`GraphPool`: the memory, the capture stream and the step counter that graphs share."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import Token
from threading import get_ident
from typing import Any, Protocol

from graphrt.core.base import (
    GraphRTError,
    InvalidOptionError,
    PoolBusyError,
    PoolClosedError,
    Uncopied,
)
from graphrt.core.batch import ForwardContext
from graphrt.core.device import (
    Capability,
    DeviceGraph,
    Platform,
    SharingFigures,
    UpdateFigures,
    resolve_platform,
)
from graphrt.core.replay.handout import HandedOut, expire

# The one thing that is process-wide, because the device is: two captures on one device at the
# same time see each other's work, whoever they belong to.
_capture_locks: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)


class AwaitsUpdates(ABC):
    """A launched step that owns the pool until its updates came."""

    def __init__(self) -> None:
        self.thread = get_ident()

    @abstractmethod
    def abandon(self) -> GraphRTError:
        """Bring the step to its end with the arguments it has; returns the error that says so."""


class HoldsGraphs(Protocol):
    """What has graphs in a pool, such as a wrapper."""

    def clear_graphs(self) -> None:
        """Destroy them all."""


class GraphPool(Uncopied):
    """Memory that graphs share when they never run concurrently: sizes, pieces, target and draft.

    A replay may overwrite the outputs of any other graph in the pool, so outputs are valid until
    the next step. `generation` counts the steps. A step that begins before another one is over,
    in another thread or inside of it, raises `PoolBusyError`; replays from two streams are ordered
    by an event.
    """

    def __init__(self, platform: Platform | str | None = None) -> None:
        """On a platform, by default the current one; raises the named errors of platforms."""
        self.platform = resolve_platform(platform)
        self.memory: Any = self.platform.new_memory()
        self.stream: Any = self.platform.new_stream()
        self.generation = 0
        self.closed = False
        # What steps of runners have handed out and no step has overwritten yet.
        self.handed_out: HandedOut = []
        # It would outlive the memory.
        weakref.finalize(self, expire, self.handed_out).atexit = False
        # The wrapper's replay path reads and writes the following directly. The owner is the
        # context of the step, or the capture, that is under way.
        self.owner: object | None = None
        self.step: Token[ForwardContext | None] | None = None
        self.read_stream_id: Callable[[], int] | None = None
        if Capability.STREAMS in self.platform.capabilities:
            self.read_stream_id = self.platform.stream_id_reader()
        self.stream_id: int | None = None
        self._step_context: ForwardContext | None = None
        self.last_stream: Any = None
        self._holders: weakref.WeakSet[HoldsGraphs] = weakref.WeakSet()

    def check_free(self, owner: object) -> object | None:
        """What owns the pool now: nothing, or `owner` itself, else raises `PoolBusyError`.

        Who takes the pool stores itself as `owner`, and afterwards what this returned, even if the
        step fails: stores that an interrupt can neither split nor lose.
        """
        outer = self.owner
        if outer is not None and outer is not owner:
            raise self.busy_error(owner)
        return outer

    def give_back(self, outer: object | None) -> None:
        """Let `outer`, which `check_free` returned, own the pool again."""
        self.owner = outer

    def enter_step(self, context: ForwardContext) -> None:
        """Count a new step of several pieces; raises `PoolBusyError` inside another one."""
        self.leave_step(context)
        self.step = context.token
        self._step_context = context
        self.generation += 1
        self.expire_outputs()

    def leave_step(self, context: ForwardContext) -> None:
        """Forget the last step of several pieces; raises `PoolBusyError` if it is not over."""
        last = self._step_context
        if last is not None and last is not context and last.token is self.step is not None:
            raise self.busy_error(context)
        self.step = None
        self._step_context = None

    def expire_outputs(self) -> None:
        """Make what runners have handed out unreadable: its memory is about to be written."""
        if self.handed_out:
            expire(self.handed_out)

    def add_holder(self, holder: HoldsGraphs) -> None:
        """Note what has graphs that `close` must destroy; it is not kept alive."""
        self._holders.add(holder)

    def follow_stream(self) -> Any:
        """Let the current stream wait if another one used the pool last; returns the current."""
        if self.read_stream_id is not None:
            stream_id = self.read_stream_id()
            if stream_id != self.stream_id:
                self.change_stream(stream_id)
        return self.last_stream

    def change_stream(self, stream_id: int) -> None:
        """Make the current stream, which has this id, wait for the one that replayed last."""
        current = self.platform.current_stream()
        if self.stream_id is not None:
            self.platform.order_after(self.last_stream)
        # Together: an interrupt in a call before them has the stream wait once more.
        self.last_stream = current
        self.stream_id = stream_id

    @property
    def capture_lock(self) -> AbstractContextManager[object]:
        """Held by the thread that captures on the device."""
        return _capture_locks[self.platform.device_type]

    def reset_graphs(self, graphs: Sequence[DeviceGraph]) -> None:
        """Destroy graphs of this pool; waits for captures of other threads on the device."""
        if graphs:
            self.expire_outputs()
            # It may synchronise the device, which would break a capture that is open.
            with self.capture_lock:
                self.platform.reset_graphs(graphs)

    def allocate(self) -> Any:
        """A context in which this thread's allocations come from the pool."""
        return self.platform.allocate_in(self.memory)

    def bytes(self) -> int | None:
        """Bytes the pool holds from the device, where that can be told."""
        return None if self.closed else self.platform.memory_bytes(self.memory)

    def sharing_figures(self) -> SharingFigures | None:
        """What it brought that graphs share executables; None where they do not."""
        return None if self.closed else self.platform.sharing_figures(self.memory)

    def update_figures(self) -> UpdateFigures | None:
        """How tasks were updated; None where that is not counted, or there are none."""
        return None if self.closed else self.platform.update_figures(self.memory)

    def close(self) -> None:
        """Destroy all graphs of the pool and give its memory back.

        Raises `PoolBusyError` while a step is under way.
        """
        if not self.closed:
            self.check_idle()
            for holder in list(self._holders):
                holder.clear_graphs()
            self.closed = True
            self.step = self._step_context = None
            with self.capture_lock:
                self.platform.release_memory(self.memory)

    def check_open(self) -> None:
        """Raise `PoolClosedError` after `close()`."""
        if self.closed:
            raise PoolClosedError(
                "the graph pool is closed",
                expected="an open pool",
                advice="create a new GraphPool and new wrappers or runners over it",
            )

    def check_platform(self, platform: Platform | str) -> None:
        """Raise `InvalidOptionError` if the pool is another platform's."""
        name = platform if isinstance(platform, str) else platform.name
        if name != self.platform.name:
            raise InvalidOptionError(
                "the pool belongs to another platform",
                got=f"platform={name!r}, pool of {self.platform.name!r}",
                expected="one platform",
                advice="leave platform= out where pool= is given",
            )

    def check_idle(self) -> None:
        """Raise `PoolBusyError` while a step or a capture is under way."""
        if self.owner is not None:
            raise self.busy_error(None)

    def busy_error(self, context: object) -> GraphRTError:
        """Why `context` cannot use the pool. A step of this thread that waits for its updates is
        ended, so that the next one can."""
        waiting = self.owner
        if isinstance(waiting, AwaitsUpdates) and waiting.thread == get_ident():
            self.owner = None
            return waiting.abandon()
        return PoolBusyError(
            "two steps use one graph pool at the same time",
            got=f"{context!r} in thread {get_ident()} while {self.owner or self._step_context!r} "
            "is under way",
            expected="one step at a time, from one thread at a time",
            advice="give what runs at the same time a GraphPool of its own",
        )
