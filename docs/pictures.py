"""The drawings of the pages: `python3 docs/pictures.py` writes docs/pictures/*.svg.

Needs matplotlib (`pip install ".[report]"`). The same version writes the same bytes. Figures of the
home page are read from benchmarks/results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "pictures"
GRAPH, EAGER, PADDING, INK, LINE = "#c5d3f6", "#fbdcb5", "#e8e8ec", "#1d2433", "#5b6478"
COLOURS = {"graph": GRAPH, "eager": EAGER, "padding": PADDING, "plain": "#ffffff"}


def canvas(width: float, height: float) -> Axes:
    """Axes in units of a tenth of an inch, without lines."""
    figure = plt.figure(figsize=(width / 10, height / 10), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return axes


def box(
    axes: Axes, x: float, y: float, width: float, text: str, kind: str, height: float = 3.4
) -> None:
    patch = FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.5",
        facecolor=COLOURS[kind], edgecolor=LINE, linewidth=0.8,
    )  # fmt: skip
    axes.add_patch(patch)
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=INK, size=9)


def label(axes: Axes, x: float, y: float, text: str, bold: bool = False, left: bool = True) -> None:
    axes.text(
        x, y, text, ha="left" if left else "center", va="center", color=INK, size=9,
        weight="bold" if bold else "normal",
    )  # fmt: skip


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color=LINE, linewidth=1)
    )


def legend(axes: Axes, x: float, y: float, kinds: Sequence[tuple[str, str]]) -> None:
    for kind, text in kinds:
        box(axes, x, y, 2, "", kind, height=1.4)
        label(axes, x + 2.7, y + 0.7, text)
        x += 6 + 0.95 * len(text)


def modes() -> None:
    axes = canvas(68, 33)
    rows = {
        "NONE": ("eager", "eager"),
        "PIECEWISE": ("pieces", "pieces"),
        "FULL": ("one graph", "one graph"),
        "FULL_DECODE_ONLY": ("one graph", "eager"),
        "FULL_AND_PIECEWISE": ("one graph", "pieces"),
    }
    label(axes, 31, 30.5, "uniform decode batch", bold=True, left=False)
    label(axes, 55, 30.5, "all other batches", bold=True, left=False)
    for row, (mode, cells) in enumerate(rows.items()):
        y = 24.5 - 5 * row
        label(axes, 1, y + 1.7, mode, bold=True)
        for x, cell in zip((20, 44), cells, strict=True):
            if cell == "pieces":
                for step in range(5):
                    box(axes, x + 4.5 * step, y, 4, "", "eager" if step % 2 else "graph")
            else:
                box(axes, x, y, 22, cell, "eager" if cell == "eager" else "graph")
    legend(axes, 20, 0.8, [("graph", "a graph"), ("eager", "eager: operator by operator")])


def sizes() -> None:
    axes = canvas(68, 25)
    label(axes, 1, 22.5, "captured sizes")
    for place, size in enumerate((1, 2, 4, 8, 16, 32)):
        box(axes, 17 + 6 * place, 20.8, 5, str(size), "graph" if size == 8 else "plain")
    label(axes, 1, 13.5, "a batch of 5")
    for row in range(8):
        live = row < 5
        box(
            axes,
            17 + 4 * row,
            11.8,
            3.6,
            str(row) if live else "pad",
            "graph" if live else "padding",
        )
    arrow(axes, (37.5, 20.6), (33, 15.5))
    label(axes, 50, 13.5, "the graph of 8")
    label(axes, 1, 7, "a batch of 40")
    box(axes, 17, 5.3, 31.6, "no graph holds it", "eager")
    label(axes, 50, 7, "eager: TOO_LARGE")
    legend(axes, 17, 1.2, [("graph", "live rows"), ("padding", "padding"), ("eager", "eager")])


def pools() -> None:
    axes = canvas(68, 27)
    label(axes, 1, 24.5, "one pool: the graphs use the same memory", bold=True)
    for place, (size, width) in enumerate(((8, 44), (4, 24), (2, 14))):
        box(axes, 12, 20 - 4 * place, width, f"graph of {size}", "graph", height=3.2)
        label(axes, 1, 21.6 - 4 * place, f"size {size}")
    arrow(axes, (12, 9.4), (64, 9.4))
    label(axes, 61, 10.6, "time")
    for x, text in ((14, "step 1"), (38, "step 2")):
        box(axes, x, 5.4, 8, text, "graph", height=3)
    box(axes, 22.4, 5.4, 15.2, "its output: valid", "plain", height=3)
    box(axes, 46.4, 5.4, 15.2, "its output: valid", "plain", height=3)
    label(axes, 14, 2.4, "With step 2 the output of step 1 is overwritten. clone() keeps it.")


def pieces() -> None:
    axes = canvas(68, 20)
    label(axes, 1, 16.7, "FULL", bold=True)
    box(axes, 14, 15, 52, "norm, projections, attention, MLP, of all layers: one launch", "graph")
    label(axes, 1, 9.7, "PIECEWISE", bold=True)
    parts = ["norm, QKV", "attention", "out, MLP, norm, QKV", "attention", "out, MLP"]
    x = 14.0
    for place, text in enumerate(parts):
        width = {0: 9.0, 2: 15.6}.get(place, 8.8)
        box(axes, x, 8, width, text, "eager" if place % 2 else "graph")
        x += width + 0.25
    for at in (23.1, 47.8):
        arrow(axes, (at + 4.4, 5.6), (at + 4.4, 7.8))
    label(axes, 14, 4.6, "@eager_break: it runs in Python, with lengths of this step")
    legend(axes, 14, 1, [("graph", "a segment: one launch"), ("eager", "an eager part")])


def tasks() -> None:
    axes = canvas(68, 20)
    label(axes, 1, 16.2, "the host", bold=True)
    label(axes, 1, 8.7, "the graph", bold=True)
    box(
        axes,
        13,
        14.4,
        52,
        'runner(batch, updates={"attention": {"lengths": [17, 4, 260]}})',
        "plain",
    )
    for place, text in enumerate(("projections", "task", "MLP, projections", "task", "MLP")):
        x = (13, 23.4, 31.8, 47.6, 56)[place]
        width = (10, 8, 15.4, 8, 9)[place]
        box(axes, x, 7, width, text, "eager" if text == "task" else "graph")
    arrow(axes, (27.4, 14.2), (27.4, 10.6))
    arrow(axes, (51.6, 14.2), (51.6, 10.6))
    label(axes, 13, 4, "CUDA: node parameters are set before the launch.")
    label(axes, 13, 1.6, "Ascend: the graph is launched, and each task waits for its lengths.")


def trust() -> None:
    axes = canvas(68, 22)
    label(axes, 1, 18.7, "a trial", bold=True)
    box(axes, 13, 12.5, 12, "state, inputs", "plain", height=5)
    for place, (text, kind) in enumerate(
        (("replay", "graph"), ("eager, same padding", "eager"), ("eager, no padding", "eager"))
    ):
        y = 17.6 - 4.4 * place
        box(axes, 31, y, 16, text, kind)
        arrow(axes, (25.2, 15), (30.8, y + 1.7))
        arrow(axes, (47.2, y + 1.7), (52.3, 15))
    box(axes, 52.5, 12.5, 14, "compare", "plain", height=5)
    label(axes, 13, 5.6, "Equal: the step returns eager's result, and replays go on.")
    label(
        axes, 13, 3.0, "Different: an error in capture(); in a step the graph goes into quarantine,"
    )
    label(axes, 13, 0.9, "and its batches run eagerly.")


def decode() -> None:
    """A decode step of a Llama of 1B shape: the figure of the home page."""
    path = ROOT / "benchmarks" / "results" / "gpu_decode_1b_h200.json"
    batches = json.loads(path.read_text(encoding="utf-8"))["results"]["1b"]["batches"]
    figure, axes = plt.subplots(figsize=(6.8, 2.3), facecolor="white")
    figure.subplots_adjust(left=0.09, right=0.99, top=0.86, bottom=0.2)
    shown = ("1", "8", "32", "128", "256")
    ways = (("eager", "eager", "#b45309"), ("graphrt FULL", "graphrt, FULL", "#3552a8"))
    for shift, (way, name, colour) in zip((-0.2, 0.2), ways, strict=True):
        values = [batches[batch]["ms"][way]["step"] for batch in shown]
        bars = axes.bar([n + shift for n in range(5)], values, 0.38, label=name, color=colour)
        axes.bar_label(bars, fmt="%.1f", size=8, padding=1)
    axes.set_xticks(range(5), shown)
    axes.set(xlabel="requests in the batch", ylabel="ms a step", ylim=(0, 6.4))
    axes.legend(frameon=False, ncols=2, loc="upper left", bbox_to_anchor=(0, 1.2))
    axes.spines[["top", "right"]].set_visible(False)


def ranks() -> None:
    """What lock-step costs in padding by the number of ranks, and what a vote adds to a step."""
    results = ROOT / "benchmarks" / "results"
    cluster = json.loads((results / "ranks_cluster.json").read_text(encoding="utf-8"))["results"]
    two = json.loads((results / "ranks_two_h200.json").read_text(encoding="utf-8"))["results"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 2.6), facecolor="white")
    figure.subplots_adjust(left=0.07, right=0.98, top=0.88, bottom=0.2, wspace=0.62)
    counts = (8, 64, 512, 4096)
    loads = list(dict.fromkeys(case.rpartition(", ")[0] for case in cluster))
    for load, colour in zip(loads, plt.get_cmap("tab10").colors, strict=False):
        costs = [cluster[f"{load}, {count} ranks"]["by votes"] for count in counts]
        left.plot(counts, costs, marker="o", markersize=3, label=load, color=colour)
    left.set_xscale("log", base=2)
    left.set_xticks(counts, [f"{count:,}" for count in counts])
    left.set(xlabel="ranks", title="tokens computed for a live one", ylim=(0, 10))
    left.legend(frameon=False, fontsize=6.5, loc="upper left")
    ways = {"step": "no vote", "vote begun before": "vote begun before", "vote and step": "vote"}
    bars = right.barh(list(ways.values()), [two[way] / 1000 for way in ways], 0.6, color="#3552a8")
    right.bar_label(bars, fmt="%.2f", size=8, padding=2)
    right.set(xlabel="ms a step, two H200", title="a step with 16 all-reduces", xlim=(0, 2.9))
    right.invert_yaxis()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_size(9)


DRAWINGS: list[Callable[[], None]] = [modes, sizes, pools, pieces, tasks, trust, decode, ranks]


def main() -> None:
    # Names in the file depend on its content alone, and no date is in it.
    mpl.rcParams.update({"svg.hashsalt": "graphrt", "font.family": "DejaVu Sans", "font.size": 9})
    OUT.mkdir(exist_ok=True)
    for drawing in DRAWINGS:
        drawing()
        plt.savefig(OUT / f"{drawing.__name__}.svg", metadata={"Date": None})
        plt.close()


if __name__ == "__main__":
    main()
