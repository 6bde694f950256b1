"""Decode attention in a graph: who decides how the keys are split, and what that costs.

    python3 -m benchmarks.gpu.attention.kernels --json attention.json

For MLA (DeepSeek-V2-Lite) and GQA (Llama-8B), ragged batches, device time of one layer in us:

- "eager": launched eagerly with the best number of splits of those tried (an oracle);
- "worst case": a graph whose splits are fixed for the longest context there can be;
- "bounds": one whose splits are fixed for the context bound that it was captured for, a power of 2;
- "device": a graph that schedules its spans by itself, from the lengths, once a step.
"""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.common import arguments, copy_bandwidth, environment, finish, show
from benchmarks.gpu.attention.paged import SHAPES, Paged, graph_us
from graphrt.attention import AttentionShape
from graphrt.attention.triton.launch import room_for
from graphrt.attention.triton.work import Room, Splits, fixed_splits, most_splits, scheduled_splits

LAYERS = 16
MAX_CONTEXT = 65_536
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
QUEUED = 4_000_000  # clock cycles for which the device is kept busy while steps are enqueued


def ragged(reqs: int, longest: int) -> list[int]:
    """Lengths of a batch: one is the longest, the others are an eighth of that to all of it."""
    chosen = random.Random(reqs * longest)
    return [longest] + [chosen.randint(max(1, longest // 8), longest) for _ in range(reqs - 1)]


def queued_us(step: Callable[[], object], rounds: int = 7) -> float:
    """Device time of a step whose launches all wait in the stream before the first one runs."""
    times = []
    for _ in range(rounds + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(QUEUED)
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[1:])


def candidates(reqs: int, longest: int, room: Room) -> Iterator[Splits]:
    for count in SPLITS:
        useful = count == 1 or count <= longest // 64
        if useful and count == most_splits(count, reqs, room):
            yield Splits(count)


def measure(shape: AttentionShape, reqs: int, longest: int, bandwidth: float) -> dict[str, Any]:
    lengths = ragged(reqs, longest)
    problem = Paged(shape, lengths, layers=LAYERS, max_context=MAX_CONTEXT)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    room = room_for(shape, torch.bfloat16, 1, processors)

    def in_graph(splits: Splits) -> float:
        problem.make_workspace(splits)
        return (
            graph_us(problem.launches(splits, room, MAX_CONTEXT, LAYERS), rounds=5, repeats=3)
            / LAYERS
        )

    tried = {splits.num_splits: in_graph(splits) for splits in candidates(reqs, longest, room)}
    best = min(tried, key=lambda count: tried[count])
    bound = max(64, 1 << (longest - 1).bit_length())
    rule = fixed_splits(longest, reqs, room).num_splits
    problem.make_workspace(Splits(best))
    eager = queued_us(problem.launches(Splits(best), room, MAX_CONTEXT, LAYERS)) / LAYERS
    return {
        "reqs": reqs,
        "longest": longest,
        "floor": problem.cache_bytes / bandwidth * 1e6,
        "best_splits": best,
        "rule_splits": rule,
        "eager": eager,
        "graph_best": tried[best],
        "worst_case": in_graph(fixed_splits(MAX_CONTEXT, reqs, room)),
        "bounds": in_graph(fixed_splits(bound, reqs, room)),
        "device": in_graph(scheduled_splits(reqs, room, MAX_CONTEXT)),
    }


def uniform(shape: AttentionShape, bandwidth: float) -> dict[str, Any]:
    """64 requests of 8192 tokens: how much of the copy bandwidth the keys are read at."""
    reqs, length = 64, 8192
    problem = Paged(shape, [length] * reqs, layers=LAYERS)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    room = room_for(shape, torch.bfloat16, 1, processors)
    splits = scheduled_splits(reqs, room, MAX_CONTEXT)
    problem.make_workspace(splits)
    us = graph_us(problem.launches(splits, room, MAX_CONTEXT, LAYERS)) / LAYERS
    return {
        "reqs": reqs,
        "length": length,
        "us": us,
        "share": problem.cache_bytes / us / bandwidth * 1e6,
    }


COLUMNS = ("floor", "eager", "graph_best", "worst_case", "bounds", "device")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--reqs", type=int, nargs="*", default=[1, 4, 16, 64, 128])
    parser.add_argument("--contexts", type=int, nargs="*", default=[128, 1024, 8192, 65_536])
    args = parser.parse_args()
    bandwidth = copy_bandwidth("cuda")
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s (read and written)")
    results: dict[str, Any] = {"copy_bandwidth": bandwidth, "layers": LAYERS, "shapes": {}}
    results["uniform"] = {}
    for name, shape in SHAPES.items():
        rows = []
        results["uniform"][name] = full = uniform(shape, bandwidth)
        print(f"{name}: 64 x 8192 in {full['us']:.1f} us, {full['share']:.0%} of copy bandwidth")
        for reqs in args.reqs:
            for longest in args.contexts:
                rows.append(measure(shape, reqs, longest, bandwidth))
                gc.collect()
                torch.cuda.empty_cache()
        results["shapes"][name] = rows
        show(
            f"{name}: us a layer",
            ["reqs", "longest", "splits", *COLUMNS, "device/best"],
            [
                [
                    row["reqs"],
                    row["longest"],
                    f"{row['rule_splits']} ({row['best_splits']})",
                    *(row[column] for column in COLUMNS),
                    row["device"] / row["graph_best"],
                ]
                for row in rows
            ],
        )
    finish("attention", args, environment("cuda"), results)


if __name__ == "__main__":
    main()
