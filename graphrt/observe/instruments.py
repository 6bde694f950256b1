"""`Instruments`: the figures of `Metrics` as instruments of an OpenTelemetry meter.

1. Counters and gauges are observable: each collection of the meter's reader reads the runner once
   for each of them, in the reader's thread, and steps pay nothing for them.
2. OpenTelemetry has no observable histogram. So `graphrt.step.duration` records each step as it
   ends, which costs the step some microseconds while the instruments are open.

There are no spans: a step lasts microseconds, and a span for each costs more than the step;
`graphrt.observe.trace` has steps, captures and trials on a timeline. `opentelemetry` is imported
with the first instruments and not before.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

from graphrt._runner import GraphRunner
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.option_values import check_kind
from graphrt.observe.metrics import BUCKETS_S, Reading, reading_of
from graphrt.observe.tap import WAYS, Observer, StepSeen, attach

Points = Iterable[tuple[float, Mapping[str, str]]]
"""Values with their attributes."""


def _steps(reading: Reading) -> Points:
    return ((count, {"reason": reason}) for reason, count in reading.steps.items())


def _graph_steps(reading: Reading) -> Points:
    return ((count, {"graph": graph}) for graph, count in reading.graphs.items())


def _tokens(reading: Reading) -> Points:
    yield reading.live_tokens, {"kind": "live"}
    yield reading.padded_tokens - reading.live_tokens, {"kind": "padding"}


def _pool(reading: Reading) -> Points:
    # A platform may not know its bytes: no point then, as 0 would be a figure.
    return [] if reading.pool_bytes is None else [(reading.pool_bytes, {})]


_COUNTERS: tuple[tuple[str, str, str, Callable[[Reading], Points]], ...] = (
    ("graphrt.steps", "{step}", "Steps by how they ran.", _steps),
    ("graphrt.graph.steps", "{step}", "Steps by the graph that served them.", _graph_steps),
    ("graphrt.tokens", "{token}", "Tokens that graphs computed, live and padding.", _tokens),
    ("graphrt.trials", "{step}", "Steps that were tried.", lambda r: [(r.tried_steps, {})]),
)
_GAUGES: tuple[tuple[str, str, str, Callable[[Reading], Points]], ...] = (
    ("graphrt.graphs", "{graph}", "Captured graphs.", lambda r: [(r.captured, {})]),
    ("graphrt.graphs.quarantined", "{graph}", "In quarantine.", lambda r: [(r.quarantined, {})]),
    ("graphrt.graphs.dropped", "{graph}", "Did not fit.", lambda r: [(r.dropped, {})]),
    ("graphrt.capture.duration", "s", "Seconds of all captures.", lambda r: [(r.capture_s, {})]),
    ("graphrt.pool.size", "By", "Bytes of the pool.", _pool),
)


class _Meter:
    """The instruments of one meter, which all its runners share: OpenTelemetry drops the callbacks
    of a second instrument of the same name."""

    def __init__(self, meter: Any, new_point: Callable[..., Any]) -> None:
        self.feeds: tuple[Instruments, ...] = ()
        """The open `Instruments` of this meter, one for each runner."""
        self._new_point = new_point
        for name, unit, text, points in _COUNTERS:
            meter.create_observable_counter(name, [self._reader(points)], unit, text)
        for name, unit, text, points in _GAUGES:
            meter.create_observable_gauge(name, [self._reader(points)], unit, text)
        self.durations = meter.create_histogram(
            "graphrt.step.duration",
            unit="s",
            description="Host seconds of a step.",
            explicit_bucket_boundaries_advisory=BUCKETS_S,
        )

    def _reader(self, points: Callable[[Reading], Points]) -> Callable[[Any], list[Any]]:
        def read(options: Any) -> list[Any]:
            return [
                self._new_point(value, {**feed.attributes, **attributes})
                for feed in self.feeds
                for value, attributes in points(reading_of(feed.runner, {}))
            ]

        return read


_meters: WeakKeyDictionary[Any, _Meter] = WeakKeyDictionary()
_lock = threading.Lock()
"""Held while instruments are added or closed."""


class _Durations(Observer):
    """Records each step as it ends."""

    def __init__(self, histogram: Any, attributes: Mapping[str, str]) -> None:
        self._histogram = histogram
        self._ways = {way: {**attributes, "way": way} for way in WAYS}

    def step(self, seen: StepSeen) -> None:
        self._histogram.record(seen.ended_s - seen.began_s, self._ways[seen.way])


class Instruments(AbstractContextManager["Instruments"]):
    """Feeds a meter from a runner until `close()`."""

    def __init__(
        self,
        runner: GraphRunner[Any],
        meter: Any = None,
        *,
        attributes: Mapping[str, str] | None = None,
    ) -> None:
        """`meter` is one of `opentelemetry.metrics`, by default that of the process named
        "graphrt"; `attributes` are put on every point, and tell the runners of a meter apart.
        Raises `InvalidOptionError`, also where opentelemetry is not installed."""
        check_kind("runner", runner, GraphRunner, optional=False, example="Instruments(runner)")
        try:
            from opentelemetry.metrics import Observation
        except ModuleNotFoundError as error:
            raise InvalidOptionError(
                "these instruments need OpenTelemetry",
                got=str(error),
                expected="opentelemetry-api, and opentelemetry-sdk for what reads a meter",
                advice="pip install opentelemetry-sdk, or poll graphrt.observe.Metrics",
            ) from error
        self.runner = runner
        self.attributes = dict(attributes or {})
        meter = _default_meter() if meter is None else meter
        with _lock:
            shared = _meters.get(meter)
            if shared is None:
                shared = _meters[meter] = _Meter(meter, Observation)
            shared.feeds += (self,)
        self._meter = shared
        self._detach = attach(runner, _Durations(shared.durations, self.attributes))

    def close(self) -> None:
        """Feed the meter no more. It keeps its callbacks for ever, but these no longer refer to the
        runner."""
        self._detach()
        with _lock:
            self._meter.feeds = tuple(each for each in self._meter.feeds if each is not self)

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@functools.cache
def _default_meter() -> Any:
    # Cached: before a provider is set, each call returns another proxy of the same meter.
    from opentelemetry.metrics import get_meter

    return get_meter("graphrt")
