"""What a step costs on the host above bare `CUDAGraph.replay()`, in microseconds.

    python3 -m benchmarks.gpu.overhead [--json FILE]

The steps of benchmarks/host_overhead.py, and whole `runner(...)` calls with five inputs against
the same by hand. Medians over many short rounds in which all take turns; before each of them the
device has become idle, so that no call waits for room in its queue.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.common import (
    arguments,
    environment,
    finish,
    left_out,
    median_us,
    show,
    synchronizer,
)
from benchmarks.host_overhead import (
    PIECES,
    SPECS,
    decode_runner,
    full_step,
    piecewise_step,
    rows_of,
    values,
)
from graphrt import Batch, GraphOptions, GraphRunner, get_platform

SIZE, LIVE = 64, 61
CALLS, PIECEWISE_CALLS = 20, 5
BARE = "bare replay"


def by_hand(graph: Any, device: str, given: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Copies into static buffers, the padding rows, and the replay."""
    static = {name: value.to(device) for name, value in values(SIZE).items()}
    live = next(iter(given.values())).shape[0]
    tails = [
        (static[name][rows_of(name, live) :], live if spec.pad == "repeat" else spec.pad_value)
        for name, spec in SPECS.items()
        if live < SIZE
    ]

    def step() -> None:
        for name, buffer in static.items():
            buffer[: rows_of(name, live)].copy_(given[name], non_blocking=True)
        for tail, pad in tails:
            tail.fill_(pad)
        graph.replay()

    return step


def runner_calls(device: str, measure: Callable[..., list[float]]) -> dict[str, float]:
    """Whole calls by what they do, and the bare replay of the same graph."""
    # A graph that fetches inputs is replayed by its runner alone.
    staging = GraphOptions(inputs_in_graph=False)
    with decode_runner(device) as runner, decode_runner(device, staging) as other:
        runner.capture()
        other.capture()
        entries = other.graphs.owners()[0].entries
        graph = next(entry.parts[0] for found, entry in entries.items() if found.num_tokens == SIZE)
        steps: dict[str, Callable[[], Any]] = {BARE: graph.replay}
        for rows, kind in ((SIZE, "at a captured size"), (LIVE, "padded")):
            on_host = values(rows)
            on_device = {name: value.to(device) for name, value in on_host.items()}
            pinned = {
                name: value.pin_memory() if device == "cuda" else value
                for name, value in on_host.items()
            }
            for place, given, own in (
                ("host", on_host, pinned),
                ("device", on_device, on_device),
            ):
                call = partial(call_runner, runner, rows, given)
                steps[f"runner, 5 {place} inputs, {kind}"] = call
                steps[f"by hand, 5 {place} inputs, {kind}"] = by_hand(graph, device, own)
        nothing, *times = measure(lambda: None, *steps.values())
        return {name: found - nothing for name, found in zip(steps, times, strict=True)}


def call_runner(runner: GraphRunner, rows: int, given: dict[str, torch.Tensor]) -> Any:
    return runner(Batch(rows, rows, 1), **given)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=301)
    options = parser.parse_args()
    left_out(options.device, ["pinned inputs by hand, which are pageable here"])
    torch.set_num_threads(1)
    platform = get_platform(options.device)
    measure = partial(
        median_us, rounds=options.rounds, warm_ups=1, synchronize=synchronizer(options.device)
    )
    short = partial(measure, calls=CALLS)
    results: dict[str, dict[str, float]] = {
        f"FULL hit, {count} sizes": full_step(platform, count, short) for count in (1, 51)
    }
    segments = piecewise_step(platform, partial(measure, calls=PIECEWISE_CALLS))
    results[f"PIECEWISE, {PIECES} segments, above bare replays"] = {
        **segments,
        **{f"{name}, times {PIECES}": value * PIECES for name, value in segments.items()},
    }
    for title, found in results.items():
        show(title, ["", "us"], [[name, value] for name, value in found.items()])
    calls = results["GraphRunner"] = runner_calls(options.device, short)
    rows: list[list[Any]] = []
    for name, value in calls.items():
        reference = calls.get(name.replace("runner", "by hand")) if "runner" in name else None
        rows.append([name, value, value - calls[BARE], reference and value / reference])
    show("Whole steps", ["", "us", "above bare replay", "to by hand"], rows)
    finish("overhead", options, environment(options.device), results)


if __name__ == "__main__":
    main()
