"""`graphrt.observe.Metrics`: counters, latencies, and the example that exposes them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from graphrt.core.base.errors import InvalidOptionError
from graphrt.observe import Histogram, Metrics
from tests.observe.planted import MIXED, PADDED, TOO_LARGE, planted_runner, run_planted, step

EXAMPLE = Path(__file__).parents[2] / "examples" / "prometheus.py"


def test_the_counters_of_metrics_equal_the_runners_report():
    runner = planted_runner()
    with Metrics(runner) as metrics:
        run_planted(runner)
        reading = metrics.read()
    steps = {reason: count for reason, count in reading.steps.items() if count}
    assert steps == {"HIT": 4 + PADDED, "TOO_LARGE": TOO_LARGE, "QUARANTINED": MIXED}
    assert reading.graphs["FULL [16 tokens 16 reqs]"] == PADDED
    assert (reading.captured, reading.quarantined, reading.dropped) == (6, 3, 0)
    assert reading.padded_tokens - reading.live_tokens == 8 * PADDED
    report = runner.report()
    assert (reading.live_tokens, reading.padded_tokens) == (
        report.live_tokens,
        report.padded_tokens,
    )
    assert reading.capture_s == report.capture_s and reading.tried_steps == 3


def test_latencies_count_only_steps_while_metrics_are_open():
    runner = planted_runner()
    step(runner, 4)
    metrics = Metrics(runner)
    run_planted(runner)
    metrics.close()
    step(runner, 4)
    latency = metrics.read().latency
    counts = {way: each.count for way, each in latency.items()}
    # Trials: of the smallest and the largest graph, and of the one that fails.
    assert counts == {"graph": 4 + PADDED - 2, "eager": TOO_LARGE + MIXED - 1, "trial": 3}
    assert all(each.sum_s > 0 for each in latency.values())
    assert metrics.read().steps["HIT"] == 6 + PADDED


def test_histogram_quantiles_are_interpolated_within_buckets():
    latency = Histogram((1.0, 2.0, 4.0), (2, 0, 2, 1), 9.0)
    assert latency.count == 5
    assert [latency.quantile(share) for share in (0.2, 0.4, 0.6, 0.8, 1.0)] == [
        0.5,
        1.0,
        3.0,
        4.0,
        4.0,
    ]
    assert Histogram((1.0,), (0, 0), 0.0).quantile(0.5) is None


@pytest.mark.parametrize("buckets", [[], [2.0, 1.0], [1.0, 1.0], "many", ["a"], [float("nan")]])
def test_invalid_histogram_buckets_are_refused(buckets):
    with pytest.raises(InvalidOptionError):
        Metrics(planted_runner(), buckets_s=buckets)


def test_metrics_of_a_plain_module_are_refused():
    with pytest.raises(InvalidOptionError, match="runner"):
        Metrics(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_the_prometheus_example_exposes_steps_tokens_and_latencies():
    parser = pytest.importorskip(
        "prometheus_client.parser", reason="needs prometheus_client (the extra test)"
    )
    from prometheus_client import CollectorRegistry, generate_latest

    collector = runpy.run_path(str(EXAMPLE))["RunnerCollector"]
    runner, registry = planted_runner(), CollectorRegistry()
    with Metrics(runner) as metrics:
        run_planted(runner)
        registry.register(collector(metrics))
        text = generate_latest(registry).decode()
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["graphrt_steps_total", "TOO_LARGE"] == TOO_LARGE
    assert samples["graphrt_tokens_total", "padding"] == 8 * PADDED
    assert samples["graphrt_quarantined_graphs",] == 3
    assert samples["graphrt_step_seconds_bucket", "+Inf", "trial"] == 3
    assert samples["graphrt_step_seconds_count", "eager"] == TOO_LARGE + MIXED - 1
