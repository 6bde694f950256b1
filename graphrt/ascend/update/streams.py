"""The streams on which pools update tasks, which no other work runs on."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakValueDictionary

from graphrt.core.base.errors import MissingUpdateError, PlatformError

_LONGEST_UPDATE_S = 60.0


class UpdateStream:
    """A stream on which pools update their tasks, and a lock in case several share it.

    Two threads that update on one stream at once collide (107033). Work that one of them queues
    between the fence and the signals of the other could wait for itself. Once `is_left` is True,
    which is to be read under the lock, no task may be updated on the stream.
    """

    def __init__(self, stream: Any) -> None:
        self.is_left = False
        self.is_awaited = False
        """Whether a launched graph waits for an update on it: another one's would wait for ever."""
        self.stream = stream
        self.id: int = stream.npu_stream
        self.lock = threading.Lock()
        self.given = next(_uses)
        """When it was given to a pool."""


# Process-wide, as torch_npu's streams are.
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


def new_update_stream(streams: Iterable[Any], current: Any, avoid: Collection[int]) -> UpdateStream:
    """The one of `streams` for the updates of one more pool, neither `current` nor among `avoid`.

    One that no work or capture ever used, and that is no other pool's; else another pool's, to be
    shared under its lock; else the one whose last use is longest ago. A stream that was made before
    graphrt kept it may be used. Raises `MissingUpdateError` if launched graphs wait on all of them,
    `PlatformError` if there is none.
    """
    with _lock:
        live = dict(_live.items())
        usable = [each for each in streams if each != current and each.npu_stream not in avoid]
        shared = [live[each.npu_stream] for each in usable if each.npu_stream in live]
        others = [each for each in usable if each.npu_stream not in live]
        unused = [each for each in others if each.npu_stream not in _last_use]
        if unused:
            return _new(unused[0])
        idle = [each for each in shared if not each.is_awaited]
        if idle:
            longest_ago = min(idle, key=lambda each: each.given)
            longest_ago.given = next(_uses)
            return longest_ago
        if others:
            return _new(min(others, key=lambda each: _last_use[each.npu_stream]))
        if shared:
            raise MissingUpdateError(
                "launched graphs wait for their updates on all streams that tasks are updated on",
                got=f"{len(shared)} calls with updates=DEFERRED, none of them updated",
                expected="at most one for each stream, and then their updates",
                advice="update a launched step first; with STREAMS_PER_DEVICE=32 there are eight",
            )
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
