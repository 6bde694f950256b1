"""What a step costs on the host above bare `CUDAGraph.replay()`, in microseconds.

    python3 -m benchmarks.gpu.overhead [--json FILE]

The steps of benchmarks/host_overhead.py, and whole `runner(...)` calls with five inputs of 35 kB
against the same by hand and by `torch.compile(mode="reduce-overhead")`, with misses. Medians over
many short rounds in which all take turns; before each of them the device has become idle, so that
no call waits for room in its queue.
"""

from __future__ import annotations

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
from benchmarks.gpu.steps import BARE, COMPILED, MEMMOVES, whole_calls
from benchmarks.host_overhead import PIECES, full_step, piecewise_step
from graphrt import get_platform
from graphrt.core.base._native_door import NativeWriter

CALLS, PIECEWISE_CALLS = 20, 5


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=301)
    options = parser.parse_args()
    left_out(options.device, ["pinned inputs by hand, which are pageable here", COMPILED])
    torch.set_num_threads(1)
    options.compiled_writer = NativeWriter is not None
    print(f"slots are written by {'C' if options.compiled_writer else 'Python'}")
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
    calls = results["GraphRunner"] = whole_calls(options.device, short)
    rows: list[list[Any]] = []
    for name, value in calls.items():
        moved = calls[f"{MEMMOVES}, {'padded' if 'padded' in name else 'at a captured size'}"]
        above = value - calls[BARE]
        same = name.replace(", outputs kept", "")
        theirs = calls.get(same.replace("fetched", "by hand").replace("staged", "by hand"))
        by_hand = value / theirs if theirs and name.startswith(("fetched", "staged")) else None
        rows.append([name, value, above, above - moved if "host" in name else None, by_hand])
    show("Whole steps", ["", "us", "above bare replay", "and memmoves", "to by hand"], rows)
    finish("overhead", options, environment(options.device), results)


if __name__ == "__main__":
    main()
