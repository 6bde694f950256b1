"""Metrics of a runner for OpenTelemetry.

    pip install opentelemetry-sdk
    python3 examples/opentelemetry_metrics.py          # prints one collection of a small run

An engine that has a meter passes it, `Instruments(runner, meter)`, and its reader exports these
figures with its own. Here the reader keeps them in memory; with opentelemetry-exporter-otlp it is
`PeriodicExportingMetricReader(OTLPMetricExporter())`, which sends them to a collector.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader

from graphrt import GraphRunner, InputSpec
from graphrt.observe import Instruments


def lines(reader: InMemoryMetricReader) -> Iterator[str]:
    """A line for each point of one collection."""
    data = reader.get_metrics_data()
    if data is None:
        return
    for resource in data.resource_metrics:
        for metric in (each for scope in resource.scope_metrics for each in scope.metrics):
            for point in metric.data.data_points:
                labels = ", ".join(f"{key}={value}" for key, value in point.attributes.items())
                value = (
                    f"{point.count} in {point.sum:.6f}"
                    if isinstance(point, HistogramDataPoint)
                    else point.value
                )
                yield f"{metric.name}{{{labels}}} {value} {metric.unit}"


def main() -> None:
    runner = GraphRunner(
        torch.nn.Linear(8, 8),
        mode="FULL",
        sizes=[2, 4],
        inputs={"input": InputSpec(torch.float32, ("tokens", 8))},
        platform="cpu",
    )
    runner.capture()
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    with Instruments(runner, provider.get_meter("engine"), attributes={"model": "linear"}):
        with torch.no_grad():
            for tokens in (1, 2, 3, 4, 5):
                runner(input=torch.ones(tokens, 8))
        print("\n".join(lines(reader)))


if __name__ == "__main__":
    main()
