"""Which streams were forked inside a capture, and where, so that an error can name them."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock, get_ident
from typing import Any

import torch

from graphrt.core.base.errors import CaptureError
from graphrt.core.capture.refusals import Source, user_source
from graphrt.cuda.driver.api import capture_dependencies, driver_available
from graphrt.cuda.driver.nodes import edges
from graphrt.cuda.private_torch import Wait, replace_event_wait


class ForkWatch:
    """Notes every wait for an event while a capture is open: that is how streams fork and join.

    torch tells nobody, so `Event.wait` is replaced meanwhile; calls of threads that capture nothing
    pass. Threads may capture at the same time, each on a device of its own.
    """

    def __init__(self) -> None:
        self._waits: dict[int, dict[int, Source | None]] = {}
        """By the thread that captures: what it made wait, and where."""
        self._restore: Callable[[], None] | None = None
        self._lock = Lock()

    def begin(self) -> None:
        with self._lock:
            self._waits[get_ident()] = {}
            if self._restore is None:
                self._restore = replace_event_wait(self._watching)

    def end(self) -> dict[int, Source | None]:
        """Watch this thread no longer; returns what it made wait, by stream, and where."""
        with self._lock:
            waits = self._waits.pop(get_ident(), {})
            if self._restore is not None and not self._waits:
                self._restore()
                self._restore = None
        return waits

    def check_joined(self, stream: int, waits: dict[int, Source | None]) -> None:
        """Raise `CaptureError` if work of another stream, one of `waits`, would be left out of the
        capture that is open on `stream`."""
        forked = {other: at for other, at in waits.items() if other != stream}
        if not forked or not driver_available():
            return
        graph, joined = capture_dependencies(stream)
        before: dict[int, list[int]] = {}
        for node, after, _ in edges(graph):
            before.setdefault(after, []).append(node)
        reached, pending = set(joined), list(joined)
        while pending:
            for node in before.get(pending.pop(), ()):
                if node not in reached:
                    reached.add(node)
                    pending.append(node)
        for other, source in forked.items():
            other_graph, last = capture_dependencies(other)
            if other_graph == graph and not reached.issuperset(last):
                raise CaptureError(
                    "a stream that was forked inside the capture was not joined before its end",
                    source=None if source is None else str(source),
                    got=f"stream {other:#x} holds work that the capture stream {stream:#x} does "
                    "not wait for",
                    advice="torch.cuda.current_stream().wait_stream(side) at the end of the "
                    "forward, and before every eager break",
                )

    def _watching(self, wait: Wait) -> Wait:
        def watching(event: Any, stream: Any = None) -> None:
            waits = self._waits.get(get_ident())
            if waits is not None:
                waiting = torch.cuda.current_stream() if stream is None else stream
                waits.setdefault(int(waiting.cuda_stream), user_source())
            wait(event, stream)

        return watching
