"""`Metrics`: counters of a runner and latencies of its steps, to poll.

Counters are those that dispatch and checks always keep. Latencies are measured while a `Metrics` is
open, on the host: on a device a step returns when it is launched, so a latency is what the host's
loop waits for, and not the device's time. `examples/prometheus.py` exposes a reading.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from graphrt._runner import GraphRunner
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.option_values import check_kind, items_of, number_of, shown
from graphrt.core.runner.report import report_of
from graphrt.observe.tap import WAYS, Observer, StepSeen, attach

BUCKETS_S = (
    25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5,
    1.0, 2.5,
)  # fmt: skip
"""Upper bounds of latencies, in seconds."""


@dataclass(frozen=True)
class Histogram:
    """Latencies: `counts[i]` is the number of those up to `bounds_s[i]` and above the bound before;
    the last count is of those above all bounds."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """The latency that this share of steps (0 to 1) does not exceed, by interpolation in its
        bucket; None without steps. Above all bounds it is the largest bound."""
        left = share * self.count
        if not self.count:
            return None
        for at, (bound, count) in enumerate(zip(self.bounds_s, self.counts, strict=False)):
            if count and left <= count:
                below = self.bounds_s[at - 1] if at else 0.0
                return below + (bound - below) * left / count
            left -= count
        return self.bounds_s[-1]


@dataclass(frozen=True)
class Reading:
    """All figures at one moment. Counts grow, unless the runner is released or its counts reset."""

    steps: dict[str, int]
    """By reason; HIT are those that a graph served."""
    graphs: dict[str, int]
    """Steps that each graph served."""
    live_tokens: int
    """Tokens of the batches that graphs served; `padded_tokens` with their padding."""
    padded_tokens: int
    captured: int
    """Graphs that there are now, which took `capture_s` to capture."""
    capture_s: float
    dropped: int
    """Graphs that did not fit on the device."""
    tried_steps: int
    quarantined: int
    """Graphs that are in quarantine now."""
    pool_bytes: int | None
    latency: dict[str, Histogram]
    """By how the step ran: "graph", "eager" or "trial"."""


class _Latencies(Observer):
    """Counts the latencies of steps, for one histogram by way: graph, eager or trial."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._counts = {way: [0] * (len(bounds) + 1) for way in WAYS}
        self._sums = dict.fromkeys(WAYS, 0.0)
        self._lock = threading.Lock()

    def step(self, seen: StepSeen) -> None:
        took = seen.ended_s - seen.began_s
        with self._lock:
            self._counts[seen.way][bisect_left(self.bounds, took)] += 1
            self._sums[seen.way] += took

    def read(self) -> dict[str, Histogram]:
        with self._lock:
            return {
                way: Histogram(self.bounds, tuple(self._counts[way]), self._sums[way])
                for way in WAYS
            }


class Metrics(AbstractContextManager["Metrics"]):
    """Counts a runner's steps until `close()`, and times them."""

    def __init__(self, runner: GraphRunner[Any], *, buckets_s: Sequence[float] = BUCKETS_S) -> None:
        """`buckets_s` are upper bounds of latencies in seconds, ascending. Raises
        `InvalidOptionError`."""
        check_kind("runner", runner, GraphRunner, optional=False, example="Metrics(runner)")
        listed = items_of("buckets_s", buckets_s, "[0.001, 0.01]")
        bounds = tuple(number_of("buckets_s", each, "a bound, in seconds,") for each in listed)
        if not bounds or list(bounds) != sorted(set(bounds)):
            raise InvalidOptionError(
                "the bounds of latencies do not ascend",
                got=shown(bounds),
                expected="at least one, each larger than the one before",
                advice="buckets_s=[0.0001, 0.001, 0.01]",
            )
        self._runner = runner
        self._latencies = _Latencies(bounds)
        self._detach: Callable[[], None] = attach(runner, self._latencies)

    def read(self) -> Reading:
        """The figures now; a few microseconds for each graph."""
        runner = self._runner
        report = report_of(runner.graphs, runner._engine.live_tokens, quick=True)
        trials = report.trust.trials
        return Reading(
            steps={reason.name: count for reason, count in report.reasons.items()},
            graphs={f"{m.name} [{d}]": count for (m, d), count in report.steps.items()},
            live_tokens=report.live_tokens,
            padded_tokens=report.padded_tokens,
            captured=len(report.graphs),
            capture_s=report.capture_s,
            dropped=len(report.dropped),
            tried_steps=sum(trial.steps for trial in trials),
            quarantined=sum(trial.status == "quarantined" for trial in trials),
            pool_bytes=report.pool_bytes,
            latency=self._latencies.read(),
        )

    def close(self) -> None:
        """Time no more steps; `read()` still works."""
        self._detach()

    def __exit__(self, *exc_info: object) -> None:
        self.close()
