"""What graphs gave on a GPU, for a demo on a CPU to say. A test compares it with its source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class GpuFigures(NamedTuple):
    """How many times as fast as eager a decode step is by its graph, by requests in the batch."""

    card: str
    torch: str
    date: str
    gains: Mapping[int, float]

    def __str__(self) -> str:
        first, *others = self.gains.items()
        more = ", ".join(f"{gain} times at batch {batch}" for batch, gain in others)
        return (
            f"On an {self.card} (torch {self.torch}, {self.date}) a graph made a decode step of a "
            f"Llama of 1B shape {first[1]} times as fast at batch {first[0]}, {more}."
        )


SOURCE = "benchmarks/results/gpu_decode_1b_h200.json"
ON_A_GPU = GpuFigures("NVIDIA H200", "2.11.0+cu130", "2026-11-21", {1: 2.6, 64: 1.9, 256: 1.1})
