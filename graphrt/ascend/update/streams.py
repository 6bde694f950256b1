"""The streams on which pools update tasks: one for each pool, which no other work runs on."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakValueDictionary

from graphrt.core.base.errors import PlatformError

_TRIES = 64
_LONGEST_UPDATE_S = 60.0


def nothing() -> None:
    """A reference to no graph."""


class UpdateStream:
    """A stream on which one pool updates its tasks, and a lock in case pools must share it.

    Two threads that update on one stream at once collide (107033). Work that one of them queues
    between the fence and the signals of the other could wait for itself. Once `is_left` is True,
    which is to be read under the lock, no task may be updated on the stream.
    """

    def __init__(self, stream: Any) -> None:
        self.is_left = False
        self.awaited: Callable[[], Any] = nothing
        """A launched graph that waits for an update on it, or None."""
        self.stream = stream
        self.id: int = stream.npu_stream
        self.lock = threading.Lock()


# Process-wide, as torch_npu's streams are: it hands out 32 (or 8) of them in turn, so that the
# 33rd "new" stream is the first one.
_lock = threading.Lock()
_live: WeakValueDictionary[int, UpdateStream] = WeakValueDictionary()
_last_use: dict[int, int] = {}
_uses = itertools.count()


def note_use(stream: Any) -> None:
    """Remember a stream that is computed or captured on, so that no task is updated on it."""
    _last_use[stream.npu_stream] = next(_uses)


def is_update_stream(stream: Any) -> bool:
    """Whether some pool updates its tasks on this stream."""
    return stream.npu_stream in _live


def leave_stream(stream: Any) -> None:
    """Keep all pools from updating on `stream` from now on, as other work or a capture comes there;
    waits for an update that is under way.

    CANN would take work between the begin and the end of an update for a part of it (507009,
    507000).
    """
    note_use(stream)
    stream_in_use = _live.get(stream.npu_stream)
    if stream_in_use is None:
        return
    with stream_in_use.lock:
        stream_in_use.is_left = True
    with _lock:
        if _live.get(stream.npu_stream) is stream_in_use:
            del _live[stream.npu_stream]


@contextmanager
def no_update_under_way() -> Iterator[None]:
    """Keep every thread from launching a graph and updating its tasks inside of the `with`.

    For calls that wait for the device and hold the GIL: an update that is under way could not go
    on, and the device waits for its signals.
    """
    with ExitStack() as held:
        held.enter_context(_lock)
        for each in list(_live.values()):
            if each.lock.acquire(timeout=_LONGEST_UPDATE_S):
                held.callback(each.lock.release)
        yield


def new_update_stream(npu: Any, current: Any, avoid: Collection[int]) -> UpdateStream:
    """A stream for the updates of one pool, which is neither `current` nor among `avoid`.

    If torch_npu has enough streams, it is one that no work or capture ever used, and of no other
    pool; else one of another pool, to be shared under its lock; else the one whose last use is
    longest ago. Raises `PlatformError` if there is no other stream at all.
    """
    with _lock:
        update_streams = dict(_live.items())
        used = {}
        shared = []
        for _ in range(_TRIES):
            stream = npu.Stream()
            if stream == current or stream.npu_stream in avoid:
                continue
            if stream.npu_stream in update_streams:
                shared.append(update_streams[stream.npu_stream])
            elif stream.npu_stream in _last_use:
                used[stream.npu_stream] = stream
            else:
                return _new(stream)
        if shared:
            return min(shared, key=lambda each: _last_use.get(each.id, -1))
        if used:
            return _new(used[min(used, key=_last_use.__getitem__)])
        raise PlatformError(
            "torch_npu has no stream to update tasks on",
            got=f"the current one, and {len(avoid)} that are captured on",
            expected="one more",
            advice="raise STREAMS_PER_DEVICE to 32",
        )


def _new(stream: Any) -> UpdateStream:
    update_stream = UpdateStream(stream)
    _live[update_stream.id] = update_stream
    return update_stream
