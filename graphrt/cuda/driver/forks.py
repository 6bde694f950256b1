"""Finds a stream that was forked inside a capture and not joined, and the line that forked it."""

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
    """Finds unjoined streams by every wait for an event in a capture, which forks or joins them.

    torch has no hook for it, so `Event.wait` is replaced while any capture is open. Threads that
    capture nothing are not noted. Threads may capture at the same time, each on its own device.
    """

    def __init__(self) -> None:
        self._waits: dict[int, dict[int, Source | None]] = {}
        """Capturing thread -> handle of a stream that it made wait -> the user's line."""
        self._restore: Callable[[], None] | None = None
        """Puts torch's `Event.wait` back; None while that is in place."""
        self._lock = Lock()

    def begin(self) -> None:
        with self._lock:
            self._waits[get_ident()] = {}
            if self._restore is None:
                self._restore = replace_event_wait(self._watching)

    def end(self) -> dict[int, Source | None]:
        """Stop watching this thread; returns the streams that it made wait, by handle, with the
        user's line of each."""
        with self._lock:
            waits = self._waits.pop(get_ident(), {})
            if self._restore is not None and not self._waits:
                self._restore()
                self._restore = None
        return waits

    def check_joined(self, stream: int, waits: dict[int, Source | None]) -> None:
        """Raise `CaptureError` if work of another stream, one of `waits`, would be left out of the
        capture that is open on `stream`."""
        forked = {side: source for side, source in waits.items() if side != stream}
        if not forked or not driver_available():
            return
        graph, joined = capture_dependencies(stream)
        predecessors: dict[int, list[int]] = {}
        for node, successor, _ in edges(graph):
            predecessors.setdefault(successor, []).append(node)
        reached, pending = set(joined), list(joined)
        while pending:
            for node in predecessors.get(pending.pop(), ()):
                if node not in reached:
                    reached.add(node)
                    pending.append(node)
        for side, source in forked.items():
            side_graph, last_nodes = capture_dependencies(side)
            if side_graph == graph and not reached.issuperset(last_nodes):
                raise CaptureError(
                    "a stream that was forked inside the capture was not joined before its end",
                    source=None if source is None else str(source),
                    got=f"stream {side:#x} holds work that the capture stream {stream:#x} does "
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
