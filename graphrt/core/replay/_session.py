"""Many captures one after the other: what needs doing only once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from graphrt.core.base import Undo, freeze_garbage, thaw_garbage


class CaptureSession:
    """What was captured in a pool since `GraphPool.capture_session()` was entered."""

    def __init__(
        self, count_captures: Callable[[], int], count_bytes: Callable[[], int | None]
    ) -> None:
        self._count_captures, self._count_bytes = count_captures, count_bytes
        self._captures, self._bytes = count_captures(), count_bytes()

    def __repr__(self) -> str:
        return f"CaptureSession({self.captures} captures)"

    @property
    def captures(self) -> int:
        """Entries that were captured."""
        return self._count_captures() - self._captures

    @property
    def pool_bytes(self) -> int | None:
        """Bytes by which the pool grew, what the host captured into it included; None where the
        platform cannot tell."""
        now = self._count_bytes()
        return None if now is None or self._bytes is None else now - self._bytes


@contextmanager
def open_session(
    session: CaptureSession,
    begin: Callable[[CaptureSession], object],
    end: Callable[[CaptureSession], object],
    *,
    freeze: bool,
) -> Iterator[CaptureSession]:
    """A session from `begin` to `end`, with garbage kept, or frozen, once for all its captures."""
    undo = Undo()
    try:
        undo.later(partial(thaw_garbage, session))
        freeze_garbage(session, heap=freeze)
        undo.later(partial(end, session))
        begin(session)
        yield session
    finally:
        undo.now()
