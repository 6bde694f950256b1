"""Streams to capture on that are graphrt's own: lent to one pool at a time, and used again.

torch's own streams are a few that it hands out in turn. Another thread that gets the one a pool
captures on has its operators captured too, on memory that every replay then overwrites.

1. `lend()` gives a stream that came back, else makes one.
2. Whoever captures on it keeps the stream object, or its `Loan`.
3. When the last of these is freed the stream comes back. It is never destroyed: an allocator may
   ask about it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Handle = TypeVar("Handle", bound=int)


class Loan:
    """Hangs on a stream as long as that lives, since a weak reference to a stream itself ends the
    process with torch 2.11."""

    __slots__ = ("__weakref__",)


class LentStreams(Generic[Handle]):
    """The streams of one kind of device. `make` makes one on the current device and returns its
    handle, `wrap` makes torch's object of a handle."""

    def __init__(self, make: Callable[[], Handle], wrap: Callable[[Handle], Any]) -> None:
        self._make = make
        self._wrap = wrap
        # device -> its idle streams, in plain lists: finalizers add to them, anywhere.
        self._idle: dict[int, list[Handle]] = {}
        # (device, handle of a lent stream) -> its loan.
        self._loans: weakref.WeakValueDictionary[tuple[int, int], Loan] = (
            weakref.WeakValueDictionary()
        )

    def lend(self, device: int) -> Any:
        """A stream of `device`, which is current, that nobody else has."""
        idle = self._idle.setdefault(device, [])
        try:
            handle = idle.pop()
        except IndexError:
            handle = self._make()
        stream, loan = self._wrap(handle), Loan()
        self._loans[device, handle] = loan
        vars(stream)["graphrt_loan"] = loan
        weakref.finalize(loan, idle.append, handle).atexit = False
        return stream

    def loan_of(self, device: int, handle: int) -> Loan | None:
        """The loan of a stream, None if it is not lent: torch makes several objects of one stream,
        and only the first holds the loan."""
        return self._loans.get((device, handle))
