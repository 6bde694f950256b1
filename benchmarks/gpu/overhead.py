"""What a step costs on the host above bare `CUDAGraph.replay()`, in microseconds.

    PYTHONPATH=. python3 benchmarks/gpu/overhead.py [--json FILE]

The steps of benchmarks/host_overhead.py, and whole `runner(...)` calls with five inputs against
the same by hand. Medians over many short rounds in which all take turns; before each of them the
device has become idle, so that no call waits for room in its queue.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import arguments, environment, finish, left_out, show, synchronizer

from graphrt import Batch, GraphRunner, InputSpec, get_platform

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import host_overhead

SIZE, LIVE, BLOCKS = 64, 61, 64
SPECS = {
    "input_ids": InputSpec(torch.int64, ("tokens",)),
    "positions": InputSpec(torch.int64, ("tokens",)),
    "slot_mapping": InputSpec(torch.int64, ("tokens",), pad=-1, index=True),
    "block_table": InputSpec(torch.int64, ("reqs", BLOCKS), index=True),
    "query_start_loc": InputSpec(torch.int32, ("reqs+1",), pad="repeat"),
}
CALLS, PIECEWISE_CALLS = 20, 5
BARE = "bare replay"


def median_us(
    *functions: Callable[[], Any], rounds: int, calls: int, synchronize: Callable[[], None]
) -> list[float]:
    """Medians over rounds in which all functions take turns, in microseconds a call."""
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(rounds):
        for function, found in zip(functions, times, strict=True):
            synchronize()
            started = time.perf_counter()
            for _ in range(calls):
                function()
            if turn:  # The first round warms up.
                found.append((time.perf_counter() - started) / calls * 1e6)
    synchronize()
    return [statistics.median(found) for found in times]


def rows_of(name: str, requests: int) -> int:
    return requests + (name == "query_start_loc")


def values(requests: int) -> dict[str, torch.Tensor]:
    """The five inputs of a decode step, on the host."""
    found = {
        name: torch.zeros(rows_of(name, requests), *spec.shape[1:], dtype=spec.dtype)
        for name, spec in SPECS.items()
    }
    found["query_start_loc"] = torch.arange(requests + 1, dtype=torch.int32)
    return found


def by_hand(graph: Any, device: str, given: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Copies into static buffers, the padding rows, and the replay."""
    static = {name: value.to(device) for name, value in values(SIZE).items()}
    live = next(iter(given.values())).shape[0]
    tails = [
        (static[name][rows_of(name, live) :], live if spec.pad == "repeat" else spec.pad)
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
    with GraphRunner(
        lambda input_ids, **_: input_ids + 1,
        inputs=SPECS,
        outputs=("tokens",),
        mode="FULL_DECODE_ONLY",
        sizes=host_overhead.default_sizes(),
        max_num_reqs=512,
        platform=device,
    ) as runner:
        runner.capture()
        entries = runner.graphs.owners()[0].entries
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
    measure = partial(median_us, rounds=options.rounds, synchronize=synchronizer(options.device))
    results: dict[str, dict[str, float]] = {}
    # Its own rounds are long enough to fill the queue of a device.
    host_overhead.median_us = partial(measure, calls=CALLS)
    for count in (1, 51):
        results[f"FULL hit, {count} sizes"] = host_overhead.full_step(platform, count)
    host_overhead.median_us = partial(measure, calls=PIECEWISE_CALLS)
    segments = host_overhead.piecewise_step(platform)
    pieces = host_overhead.PIECES
    results[f"PIECEWISE, {pieces} segments, above bare replays"] = {
        **segments,
        **{f"{name}, times {pieces}": value * pieces for name, value in segments.items()},
    }
    for title, found in results.items():
        show(title, ["", "us"], [[name, value] for name, value in found.items()])
    calls = results["GraphRunner"] = runner_calls(options.device, partial(measure, calls=CALLS))
    rows: list[list[Any]] = []
    for name, value in calls.items():
        reference = calls.get(name.replace("runner", "by hand")) if "runner" in name else None
        rows.append([name, value, value - calls[BARE], reference and value / reference])
    show("Whole steps", ["", "us", "above bare replay", "to by hand"], rows)
    finish("overhead", options, environment(options.device), results)


if __name__ == "__main__":
    main()
