"""`graphrt.observe.Instruments`: a run read by OpenTelemetry's in-memory reader."""

from __future__ import annotations

import gc
import runpy
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from graphrt.core.base.errors import InvalidOptionError
from graphrt.observe import Instruments, Metrics
from tests.observe.planted import MIXED, PADDED, TOO_LARGE, planted_runner, run_planted, step

EXAMPLE = Path(__file__).parents[2] / "examples" / "opentelemetry_metrics.py"
Points = dict[tuple[str, ...], Any]


@pytest.fixture
def reader():
    export = pytest.importorskip(
        "opentelemetry.sdk.metrics.export", reason="needs opentelemetry-sdk (the extra test)"
    )
    return export.InMemoryMetricReader()


@pytest.fixture
def meter(reader):
    from opentelemetry.sdk.metrics import MeterProvider

    provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    yield provider.get_meter("engine")
    provider.shutdown()


def collected(reader: Any) -> Points:
    """Points of one collection, by the name and the values of attributes."""
    data = reader.get_metrics_data()
    return {
        (metric.name, *point.attributes.values()): point
        for resource in (() if data is None else data.resource_metrics)
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }


def test_collected_instruments_equal_the_figures_of_metrics(reader, meter):
    runner = planted_runner()
    with Instruments(runner, meter), Metrics(runner) as metrics:
        run_planted(runner)
        points, reading = collected(reader), metrics.read()
    values = {key: getattr(point, "value", None) for key, point in points.items()}
    assert values["graphrt.steps", "HIT"] == 4 + PADDED
    assert values["graphrt.steps", "TOO_LARGE"] == TOO_LARGE
    assert values["graphrt.steps", "QUARANTINED"] == MIXED
    assert values["graphrt.graph.steps", "FULL [16 tokens 16 reqs]"] == PADDED
    assert values["graphrt.tokens", "live"] == reading.live_tokens
    assert values["graphrt.tokens", "padding"] == 8 * PADDED
    assert values["graphrt.trials",] == reading.tried_steps == 3
    assert values["graphrt.graphs",] == 6 and values["graphrt.graphs.quarantined",] == 3
    assert values["graphrt.graphs.dropped",] == 0
    assert values["graphrt.pool.size",] == reading.pool_bytes
    assert values["graphrt.capture.duration",] == reading.capture_s


def test_step_durations_are_recorded_in_the_buckets_of_metrics(reader, meter):
    runner = planted_runner()
    step(runner, 4)  # before the instruments: counted, not timed
    with Instruments(runner, meter), Metrics(runner) as metrics:
        run_planted(runner)
        points, latency = collected(reader), metrics.read().latency
    for way in ("graph", "eager", "trial"):
        point = points["graphrt.step.duration", way]
        assert point.count == latency[way].count > 0
        assert point.explicit_bounds == latency[way].bounds_s
        assert point.sum > 0


def test_two_runners_of_a_meter_are_distinguished_by_attributes(reader, meter):
    first, second = planted_runner(), planted_runner()
    with (
        Instruments(first, meter, attributes={"runner": "first"}),
        Instruments(second, meter, attributes={"runner": "second"}),
    ):
        step(first, 4)
        for _ in range(2):
            step(second, 4)
        points = collected(reader)
    assert points["graphrt.steps", "first", "HIT"].value == 1
    assert points["graphrt.steps", "second", "HIT"].value == 2
    assert points["graphrt.step.duration", "first", "trial"].count == 1


def test_closed_instruments_report_nothing_and_release_the_runner(reader, meter):
    runner = planted_runner()
    entrance = runner._run
    instruments = Instruments(runner, meter)
    assert runner._run is not entrance
    instruments.close()
    instruments.close()
    assert runner._run is entrance
    assert not any(name == "graphrt.steps" for name, *_ in collected(reader))
    alive = weakref.ref(runner)
    del runner, entrance, instruments
    gc.collect()
    assert alive() is None


def test_instruments_can_still_read_a_closed_runner(reader, meter):
    runner = planted_runner()
    with Instruments(runner, meter):
        step(runner, 4)
        runner.close()
        assert collected(reader)["graphrt.graphs",].value == 0


def test_without_opentelemetry_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", None)
    with pytest.raises(InvalidOptionError, match="pip install opentelemetry-sdk"):
        Instruments(planted_runner())


def test_instruments_of_a_plain_module_are_refused():
    with pytest.raises(InvalidOptionError, match="runner"):
        Instruments(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_the_opentelemetry_example_prints_step_counts_and_durations(reader, monkeypatch, capsys):
    monkeypatch.setenv("GRAPHRT_PLATFORM", "cpu")
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert "graphrt.steps{model=linear, reason=TOO_LARGE} 1 {step}" in printed
    assert "graphrt.step.duration{model=linear, way=eager} 1 in " in printed
