"""Replay against eager on the CPU, and what the arena saves.

    python3 -m benchmarks.cpu_replay [--json FILE]

The demo's seeded decoder: whole runner calls at captured sizes, without and with
`CpuPlatform(fuse=True)`, against the same callable run eagerly on the same padded inputs; taken in
turns of a few calls, medians over the turns, on one thread. Arena bytes are over all graphs of a
run.
"""

from __future__ import annotations

import argparse
import json
import platform as host_platform
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import median_us
from graphrt import Batch, GraphOptions, GraphRunner, get_platform
from graphrt.cpu import CpuPlatform
from graphrt.demo import Decoder, EngineLimits, Setup, make_runner, seeded_checkpoint

ROUNDS = 40
CALLS = 10
"""In a turn: the weights and caches of the others leave the processor's caches in the first."""
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)


def demo_setup() -> Setup:
    checkpoint, limits = seeded_checkpoint(), EngineLimits()
    slots = limits.pages(limits.context) * limits.page_size
    decoder = Decoder(checkpoint.config, checkpoint.weights, slots)
    return Setup(decoder, get_platform("cpu"), limits, [], 1, frozenset())


def step_inputs(limits: EngineLimits, tokens: int, reqs: int) -> dict[str, torch.Tensor]:
    """`tokens` tokens of `reqs` requests, the last with what is left over."""
    starts = torch.arange(reqs + 1, dtype=torch.int32)
    starts[-1] = tokens
    pages = limits.pages(limits.context)
    return {
        "input_ids": torch.randint(0, 256, (tokens,)),
        "positions": torch.arange(tokens) % 16,
        "slot_mapping": torch.arange(tokens) % limits.page_size + limits.page_size,
        "block_table": torch.ones(reqs, pages, dtype=torch.int64),
        "query_start_loc": starts,
    }


def captured(setup: Setup) -> tuple[GraphRunner, float]:
    """A runner with all graphs, and the seconds of its capture."""
    runner = make_runner(setup, GraphOptions())
    started = time.perf_counter()
    runner.capture()
    return runner, time.perf_counter() - started


def demo(mode: str) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """A row for each captured size: eager, replayed and fused whole runner calls."""
    setup = replace(demo_setup(), graphs={"mode": mode, "sizes": SIZES})
    plain, plain_s = captured(setup)
    fused, fused_s = captured(replace(setup, platform=CpuPlatform(fuse=True)))
    rows = []
    with plain, fused:
        for size in (1, 4, 8, 16, 64):
            reqs = min(size, setup.limits.max_num_reqs)
            values = step_inputs(setup.limits, size, reqs)
            batch = Batch(size, reqs, 1 if reqs == size else None)
            found = plain.dispatcher.dispatch(batch)
            times = median_us(
                lambda b=batch, f=found, v=values: plain.run_padded_eagerly(b, f, v),
                lambda b=batch, v=values: plain(b, **v),
                lambda b=batch, v=values: fused(b, **v),
                rounds=ROUNDS,
                calls=CALLS,
            )
            names = ("eager_us", "replay_us", "fused_us")
            rows.append(
                {"mode": found.mode.name, "tokens": size, **dict(zip(names, times, strict=True))}
            )
        memory = {
            "graphs": len(plain.plan.keys),
            "arena_bytes": plain.pool.memory.reserved_bytes,
            "capture_s": plain_s,
            "fused_capture_s": fused_s,
        }
    return rows, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for mode in ("FULL", "FULL_AND_PIECEWISE"):
        rows, memory = demo(mode)
        results[mode] = {"steps": rows, "memory": memory}
        print(f"demo model, mode {mode}")
        for row in rows:
            eager, replay, fused = row["eager_us"], row["replay_us"], row["fused_us"]
            print(
                f"  {row['mode']:<10}{row['tokens']:>4} tokens   eager {eager:8.0f} us"
                f"   replay {replay:8.0f} us   {eager / replay:5.2f} times as fast"
                f"   fused {fused:8.0f} us   {eager / fused:5.2f} times as fast"
            )
        print(
            f"  arena of {memory['graphs']} graphs: {memory['arena_bytes'] / 2**20:.2f} MiB;"
            f" captured in {memory['capture_s']:.2f} s, fused in {memory['fused_capture_s']:.2f} s"
        )
    if options.json:
        machine = {
            "machine": host_platform.processor() or host_platform.machine(),
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "threads": 1,
        }
        options.json.write_text(json.dumps({**machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
