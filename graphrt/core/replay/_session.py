"""Many captures one after the other: what needs doing only once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from graphrt.core.base._undo import Undo
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.garbage import freeze_garbage, thaw_garbage
from graphrt.core.base.homes import public
from graphrt.core.base.option_values import check_callable


@public("graphrt")
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


class OpenSession(AbstractContextManager[CaptureSession]):
    """A session from `begin` to `end`, with garbage kept, or frozen, once for all its captures."""

    def __init__(
        self,
        session: CaptureSession,
        begin: Callable[[CaptureSession], object],
        end: Callable[[CaptureSession], object],
        *,
        freeze: bool,
    ) -> None:
        # A generator: where an interrupt has `with` lose its end, it ends as it is collected.
        self._opened = _opened(session, begin, end, freeze=freeze)
        self._entered = False

    def __enter__(self) -> CaptureSession:
        if self._entered:
            raise InvalidOptionError(
                "a capture session was entered twice",
                got="`with` of one that is under way, or over",
                expected="one `with` for each session",
                advice="call pool.capture_session() for another one",
            )
        self._entered = True
        return self._opened.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._opened.__exit__(*error)


@contextmanager
def _opened(
    session: CaptureSession,
    begin: Callable[[CaptureSession], object],
    end: Callable[[CaptureSession], object],
    *,
    freeze: bool,
) -> Iterator[CaptureSession]:
    undo = Undo()
    try:
        undo.later(partial(thaw_garbage, session))
        freeze_garbage(session, heap=freeze)
        undo.later(partial(end, session))
        begin(session)
        yield session
    finally:
        undo.now()


def tell(on_capture: Any, *captured: object) -> None:
    """Call the hook of a pool, if there is one; raises `InvalidOptionError` for what is none."""
    if on_capture is not None:
        check_callable("on_capture", on_capture)
        on_capture(*captured)
