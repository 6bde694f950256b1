"""Where the time of a `GraphRunner.capture()` goes, by timing what it calls of its platform."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from graphrt import Host, Platform, get_platform

WARM_UP, RECORDING = "warm-up forward", "recording the forward"
CALLS = {
    "new_graph": "new graph",
    "begin_capture": "begin capture",
    "end_capture": "end capture and instantiate",
    "memory_bytes": "memory figures",
    "owns": "whose memory it is",
    "weak_ref": "weak references",
}
FIRST_REPLAY = "first replay"
REST = "the rest, eager parts included"


class Breakdown:
    """Host seconds by part; no part contains another one."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._calls: defaultdict[str, int] = defaultdict(int)
        self._platform: Platform | None = None
        self._graphs: list[Any] = []
        self._part: str | None = None
        self._since = 0.0

    def settings(self, platform: str) -> dict[str, Any]:
        """What the runner to be measured is made with."""
        self._platform = get_platform(platform)
        return {"platform": self._platform, "host": Host(bind=self._bind)}

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """The platform's calls are timed in the body. The platform is one of the process, so
        nothing else may capture meanwhile."""
        platform: Any = self._platform
        for method, part in CALLS.items():
            setattr(platform, method, self._timed(part, getattr(platform, method), method))
        try:
            yield
        finally:
            self._enter(None)
            for method in CALLS:
                delattr(platform, method)
            for graph in self._graphs:
                del graph.replay
            self._graphs.clear()

    def shares(self, whole: float) -> dict[str, tuple[float, int]]:
        """Seconds and calls of each part, the largest first, and then the rest of `whole`."""
        parts = sorted(self._seconds, key=lambda part: -self._seconds[part])
        found = {part: (self._seconds[part], self._calls[part]) for part in parts}
        return {**found, REST: (whole - sum(self._seconds.values()), 0)}

    def _bind(self, buffers: object, descriptor: object, phase: str) -> None:
        if phase == "warmup":
            self._enter(WARM_UP)
        elif phase == "capture":
            self._enter(None)

    def _enter(self, part: str | None) -> None:
        now = time.perf_counter()
        if self._part is not None:
            self._seconds[self._part] += now - self._since
        if part is not None:
            self._calls[part] += 1
        self._part, self._since = part, now

    def _timed(self, part: str, function: Callable[..., Any], method: str = "") -> Any:
        def timed(*args: Any) -> Any:
            outer = self._part
            self._enter(part)
            try:
                result = function(*args)
            finally:
                self._enter(outer)
                if outer is not None:
                    # It goes on, it does not begin again.
                    self._calls[outer] -= 1
            if method == "begin_capture":
                self._enter(RECORDING)
            elif method == "end_capture":
                # Recording ended where this call began.
                self._enter(None)
            elif method == "new_graph":
                # Graphs without a dictionary count as the rest.
                with suppress(AttributeError):
                    result.replay = self._timed(FIRST_REPLAY, result.replay)
                    self._graphs.append(result)
            return result

        return timed
