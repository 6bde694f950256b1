"""Whether what a process holds stays level over a long run, and by which types it does not."""

from __future__ import annotations

import gc
import os
import sys
import threading
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

MIB = 1 << 20
SHARE = 1.02
"""The most that the last third's median may be of the middle third's."""
BESIDES = {"resident": 2 * MIB, "device": MIB, "arena": 0, "fds": 0, "threads": 0}
"""By how much a figure may rise all the same: what allocators and other libraries do."""
OBJECTS_BESIDES = 30
"""The same for objects, tensors, and each type of them."""


class Series:
    """One figure at several steps."""

    def __init__(self) -> None:
        self.values = array("q")

    def add(self, at: int, value: int) -> None:
        """The figure of sample number `at`; what was missing before is 0."""
        self.values.extend([0] * (at - len(self.values)))
        self.values.append(value)


def rise(steps: Sequence[int], values: Sequence[int]) -> float:
    """By how much the least-squares line rises over the last two thirds of the samples."""
    start = len(values) // 3
    xs, ys = steps[start:], values[start:]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / (spread or 1)
    return slope * (xs[-1] - xs[0])


def is_level(steps: Sequence[int], values: Sequence[int], besides: float) -> bool:
    """Whether the line over the last two thirds rises by at most 2 % of the middle third's median,
    or by `besides`, and the last third's median is no further above the middle third's."""
    third = len(values) // 3
    middle, last = median(values[third : 2 * third]), median(values[2 * third :])
    may = max((SHARE - 1) * middle, besides)
    return rise(steps, values) <= may and last - middle <= may


class Figures:
    """What the process holds, at intervals. The first sample should be after a warm-up."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.steps = array("q")
        self.series: dict[str, Series] = {}
        self.types: dict[str, Series] = {}

    def sample(self, step: int, arena_bytes: int) -> None:
        """Count at this step; collects garbage first."""
        gc.collect()
        at = len(self.steps)
        figures = {"arena": arena_bytes, **_of_process(), **self._of_device()}
        kinds = Counter(map(type, gc.get_objects()))
        tensors = sum(count for kind, count in kinds.items() if issubclass(kind, torch.Tensor))
        figures.update(tensors=tensors, objects=sum(kinds.values()))
        for kind, count in kinds.items():
            name = f"{kind.__module__}.{kind.__qualname__}"
            series = self.types.setdefault(name, Series())
            if len(series.values) > at:
                series.values[at] += count
            else:
                series.add(at, count)
        for name, value in figures.items():
            self.series.setdefault(name, Series()).add(at, value)
        for series in self.types.values():
            series.values.extend([0] * (at + 1 - len(series.values)))
        self.steps.append(step)

    def not_level(self, only: Sequence[str] = ()) -> list[str]:
        """Lines for the figures that rise, all of them or these alone, and the types that do."""
        if len(self.steps) < 6:
            return []
        rising = [
            f"{name} rises: {', '.join(map(str, series.values))}"
            for name, series in self.series.items()
            if (not only or name in only)
            and not is_level(self.steps, series.values, BESIDES.get(name, OBJECTS_BESIDES))
        ]
        return rising if only else [*rising, *self._rising_types()]

    def rows(self) -> list[str]:
        """A table: each figure at the start, after a third, after two thirds, and at the end."""
        last = len(self.steps) - 1
        marks = [0, last // 3, 2 * last // 3, last]
        head = f"{'':<10}" + "".join(f"{f'step {self.steps[at]}':>16}" for at in marks)
        rows = [head + f"{'rise over 2/3':>16}"]
        for name, series in self.series.items():
            scale = MIB if name in ("resident", "device", "arena") else 1
            cells = [series.values[at] / scale for at in marks]
            cells.append(rise(self.steps, series.values) / scale)
            rows.append(f"{name:<10}" + "".join(f"{cell:>16,.1f}" for cell in cells))
        return rows

    def _rising_types(self) -> list[str]:
        risen = {
            name: rise(self.steps, series.values)
            for name, series in self.types.items()
            if not is_level(self.steps, series.values, OBJECTS_BESIDES)
        }
        return [
            f"objects of {name} rise by {by:.0f}"
            for name, by in sorted(risen.items(), key=lambda each: -each[1])
        ]

    def _of_device(self) -> dict[str, int]:
        return {"device": torch.cuda.memory_allocated()} if self._device == "cuda" else {}


def _of_process() -> dict[str, int]:
    """What the system says, on Linux; elsewhere what Python knows."""
    process = Path("/proc/self")
    figures = {"threads": threading.active_count(), "blocks": sys.getallocatedblocks()}
    if process.is_dir():
        pages = int((process / "statm").read_text(encoding="ascii").split()[1])
        figures["resident"] = pages * os.sysconf("SC_PAGE_SIZE")
        figures["fds"] = len(os.listdir(process / "fd"))
        figures["threads"] = len(os.listdir(process / "task"))
    return figures


def plot(figures: Figures, path: str) -> None:
    """Every figure over the steps, as parts of its largest; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, axes = pyplot.subplots(figsize=(9, 5))
    for name, series in figures.series.items():
        most = max(series.values) or 1
        axes.plot(figures.steps, [each / most for each in series.values], label=name)
    axes.set(xlabel="steps", ylabel="of the largest", ylim=(0, 1.05))
    axes.legend()
    drawing.savefig(path)
    pyplot.close(drawing)
