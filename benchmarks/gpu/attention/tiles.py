"""The tile sizes of the decode kernels: every candidate at a few batches, against copy bandwidth.

    python3 -m benchmarks.gpu.attention.tiles --json tiles.json

Kernel times are of graphs of 8 launches, whose caches are together larger than the L2 cache.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.common import arguments, copy_bandwidth, environment
from benchmarks.gpu.attention.paged import SHAPES, Paged, graph_us
from graphrt.attention import AttentionShape, LatentShape
from graphrt.attention.triton.launch import Tiles, room_for
from graphrt.attention.triton.work import scheduled_splits

ITSELF = (sys.executable, "-m", "benchmarks.gpu.attention.tiles")
LAUNCHES = 8
LONGEST = 1 << 30
BATCHES = ((64, 8192, 1), (1, 32768, 1), (16, 2048, 1), (64, 8192, 4))


def candidates(shape: AttentionShape) -> Iterator[Tiles]:
    if isinstance(shape, LatentShape):
        for block_n, warps, stages in itertools.product((32, 64), (4, 8), (1, 2, 3)):
            if block_n * stages <= 128 or stages == 1:
                yield Tiles(block_n, warps, stages)
        return
    for block_n, warps, stages in itertools.product((32, 64), (2, 4, 8), (2, 3, 4)):
        yield Tiles(block_n, warps, stages)


def compile_share(share: int, of: int) -> None:
    """Compile a part of the candidates into Triton's cache, in a process of its own."""
    work = [
        (shape, tiles, query_len)
        for shape in SHAPES.values()
        for tiles in candidates(shape)
        for query_len in (1, 4)
    ]
    for shape, tiles, query_len in work[share::of]:
        problem = Paged(shape, [64], query_len, layers=1)
        room = room_for(shape, torch.bfloat16, query_len, 132)
        problem.make_workspace(scheduled_splits(1, room, LONGEST))
        try:
            problem.launches(scheduled_splits(1, room, LONGEST), room, LONGEST, LAUNCHES, tiles)()
        except Exception as error:
            print("left out:", tiles, type(error).__name__, str(error)[:80])


def measure(name: str, batch: tuple[int, int, int], first: int) -> None:
    """Print one JSON line for each candidate from `first` on."""
    shape, (reqs, length, query_len) = SHAPES[name], batch
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    problem = Paged(shape, [length] * reqs, query_len, layers=LAUNCHES)
    for index, tiles in enumerate(candidates(shape)):
        if index < first:
            continue
        print(json.dumps({"index": index}), flush=True)
        room = room_for(shape, torch.bfloat16, query_len, processors)
        for waves in (1, 2):
            scaled = replace(room, wave=room.wave * waves)
            splits = scheduled_splits(reqs, scaled, LONGEST)
            problem.make_workspace(splits)
            us = graph_us(problem.launches(splits, scaled, LONGEST, LAUNCHES, tiles)) / LAUNCHES
            found = {"us": us, "waves": waves, **vars(tiles), "bytes": problem.cache_bytes}
            print(json.dumps(found), flush=True)


def measured(name: str, batch: tuple[int, int, int]) -> list[dict[str, Any]]:
    """What `measure` prints; a kernel that breaks the process is left out, and printed."""
    found: list[dict[str, Any]] = []
    first = 0
    while True:
        request = json.dumps([name, batch, first])
        done = subprocess.run(
            [*ITSELF, "--measure", request],
            capture_output=True,
            text=True,
        )
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        found += [line for line in lines if "us" in line]
        if done.returncode == 0:
            return found
        first = [line["index"] for line in lines if "index" in line][-1] + 1
        tiles = list(candidates(SHAPES[name]))[first - 1]
        print(f"left out: {tiles}: {done.stderr.strip().splitlines()[-1][:90]}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--share", type=int, default=None)
    parser.add_argument("--of", type=int, default=12)
    parser.add_argument("--measure", default=None)
    args = parser.parse_args()
    if args.share is not None:
        compile_share(args.share, args.of)
        return
    if args.measure is not None:
        name, batch, first = json.loads(args.measure)
        measure(name, tuple(batch), first)
        return
    others = [
        subprocess.Popen([*ITSELF, "--share", str(i), "--of", str(args.of)]) for i in range(args.of)
    ]
    for other in others:
        other.wait()
    bandwidth = copy_bandwidth("cuda")
    print(f"copy: {bandwidth / 1e12:.2f} TB/s")
    results = []
    for name, batch in itertools.product(SHAPES, BATCHES):
        found = sorted(measured(name, batch), key=lambda each: each["us"])
        floor_us = found[0]["bytes"] / bandwidth * 1e6
        print(f"{name} {batch[0]} x {batch[1]}, q {batch[2]}: floor {floor_us:.1f} us")
        for each in found[:8]:
            tiles = ", ".join(
                f"{key} {each[key]}" for key in ("block_n", "warps", "stages", "waves")
            )
            print(f"  {each['us']:8.1f} us  {floor_us / each['us']:4.0%}  {tiles}")
        results.append({"shape": name, "batch": batch, "floor_us": floor_us, "candidates": found})
    if args.json is not None:
        record = {"environment": environment("cuda"), "copy": bandwidth, "results": results}
        args.json.write_text(json.dumps(record, indent=1, default=str))


if __name__ == "__main__":
    main()
