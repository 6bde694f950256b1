"""Metrics of a runner for Prometheus: what a serving engine puts beside its own.

    pip install prometheus_client
    python3 examples/prometheus.py          # prints one scrape of a small run

An engine registers `RunnerCollector(metrics)` where it registers its own collectors, and serves
them as before (`prometheus_client.start_http_server(9400)`). Every scrape polls the runner: a few
microseconds for each graph, in the thread of the scrape.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from graphrt import GraphRunner, InputSpec
from graphrt.observe import Histogram, Metrics


class RunnerCollector(Collector):
    """The figures of one runner, each time they are asked for."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        reading = self._metrics.read()
        steps = CounterMetricFamily("graphrt_steps", "Steps by how they ran.", labels=["reason"])
        for reason, count in reading.steps.items():
            steps.add_metric([reason], count)
        yield steps
        graphs = CounterMetricFamily("graphrt_graph_steps", "Steps by graph.", labels=["graph"])
        for graph, count in reading.graphs.items():
            graphs.add_metric([graph], count)
        yield graphs
        tokens = CounterMetricFamily("graphrt_tokens", "Tokens of replays.", labels=["kind"])
        tokens.add_metric(["live"], reading.live_tokens)
        tokens.add_metric(["padding"], reading.padded_tokens - reading.live_tokens)
        yield tokens
        yield CounterMetricFamily("graphrt_trials", "Steps that were tried.", reading.tried_steps)
        for name, text, value in (
            ("graphrt_captured_graphs", "Graphs that are captured.", reading.captured),
            ("graphrt_quarantined_graphs", "Graphs that failed a check.", reading.quarantined),
            ("graphrt_dropped_graphs", "Graphs that did not fit.", reading.dropped),
            ("graphrt_capture_seconds", "Seconds that capturing took.", reading.capture_s),
            ("graphrt_pool_bytes", "Bytes of the pool.", reading.pool_bytes or 0),
        ):
            yield GaugeMetricFamily(name, text, value)
        seconds = HistogramMetricFamily(
            "graphrt_step_seconds", "Host seconds of a step.", labels=["way"]
        )
        for way, latency in reading.latency.items():
            seconds.add_metric([way], cumulated(latency), latency.sum_s)
        yield seconds


def cumulated(latency: Histogram) -> list[tuple[str, float]]:
    """Prometheus counts in each bucket what is below its bound, those of smaller buckets too."""
    total, buckets = 0, []
    for bound, count in zip((*latency.bounds_s, float("inf")), latency.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
    return buckets


def main() -> None:
    runner = GraphRunner(
        torch.nn.Linear(8, 8),
        mode="FULL",
        sizes=[2, 4],
        inputs={"input": InputSpec(torch.float32, ("tokens", 8))},
        platform="cpu",
    )
    runner.capture()
    registry = CollectorRegistry()
    with Metrics(runner) as metrics:
        registry.register(RunnerCollector(metrics))
        with torch.no_grad():
            for tokens in (1, 2, 3, 4, 5):
                runner(input=torch.ones(tokens, 8))
        print(generate_latest(registry).decode())


if __name__ == "__main__":
    main()
