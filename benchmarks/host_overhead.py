"""What a step costs on the host above the device's own replay call.

    python3 -m benchmarks.host_overhead [--platform cpu] [--json FILE]

Each row is the median of many short runs, in microseconds, taken in turns with the bare replay
call of the same run, so that a noisy machine disturbs both. The forward is one small operator:
what is measured is dispatch, context, wrapper and runner, not the model.
"""

from __future__ import annotations

import argparse
import json
import platform as host_platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import median_us
from graphrt import (
    Batch,
    BatchDescriptor,
    ForwardContext,
    GraphDispatcher,
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphRunner,
    InputSpec,
    eager_break,
)
from graphrt.core.batch.context import CaptureTransaction
from graphrt.core.capture.wrapper import wrapper_class
from graphrt.core.device.registry import resolve_platform
from graphrt.observe import Metrics

ROUNDS, CALLS, PIECES = 41, 400, 33
TOO_LARGE = 600
"""More tokens and requests than any graph has."""


SPECS = {
    "input_ids": InputSpec(torch.int64, ("tokens",)),
    "positions": InputSpec(torch.int64, ("tokens",)),
    "slot_mapping": InputSpec(torch.int64, ("tokens",), pad=-1, index=True),
    "block_table": InputSpec(torch.int64, ("reqs", 64), pad=0, index=True),
    "query_start_loc": InputSpec(torch.int32, ("reqs+1",), pad="repeat"),
}
Measure = Callable[..., list[float]]
"""Medians of the functions that it is given, in microseconds a call."""


def measure(*functions: Callable[[], Any]) -> list[float]:
    """Medians over short runs, in turns; for a device whose queue they do not fill."""
    return median_us(*functions, rounds=ROUNDS, calls=CALLS)


def rows_of(name: str, requests: int) -> int:
    """Rows of an input in a decode step."""
    return requests + (name == "query_start_loc")


def values(requests: int) -> dict[str, torch.Tensor]:
    """The five inputs of a decode step, on the host."""
    found = {
        name: torch.zeros(rows_of(name, requests), *spec.shape[1:], dtype=spec.dtype)
        for name, spec in SPECS.items()
    }
    found["query_start_loc"] = torch.arange(requests + 1, dtype=torch.int32)
    return found


def decode_runner(platform: Any, options: GraphOptions | None = None) -> GraphRunner:
    """A runner with five inputs and one small operator, of the default sizes."""
    return GraphRunner(
        lambda input_ids, **_: input_ids + 1,
        inputs=SPECS,
        outputs=("tokens",),
        mode="FULL_DECODE_ONLY",
        sizes=default_sizes(),
        max_num_reqs=512,
        platform=platform,
        options=options,
    )


def mixed_and_decode(count: int) -> list[tuple[GraphMode, BatchDescriptor]]:
    """`count` sizes as FULL decode graphs and as PIECEWISE ones."""
    sizes = range(1, count + 1) if count != 51 else default_sizes()
    keys = [(GraphMode.PIECEWISE, BatchDescriptor(size)) for size in sizes]
    return keys + [
        (GraphMode.FULL, BatchDescriptor(size, size, uniform=True, query_len=1)) for size in sizes
    ]


def default_sizes() -> list[int]:
    return [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]


def full_step(platform: Any, count: int, measure: Measure = measure) -> dict[str, float]:
    """Dispatch, context and wrapper of a FULL hit, with `count` captured sizes."""
    pool = GraphPool(platform)
    buffer = torch.zeros(1, 8, device=platform.device_type)
    wrapper = wrapper_class(platform)(lambda x: x.add_(1), GraphMode.FULL, pool=pool)
    dispatcher = GraphDispatcher("FULL_AND_PIECEWISE")
    for mode, descriptor in mixed_and_decode(count):
        slot = dispatcher.reserve(mode, descriptor)
        if mode is GraphMode.FULL:
            with ForwardContext(mode, descriptor, capture=CaptureTransaction(slot)):
                wrapper(buffer)
        dispatcher.publish(mode, descriptor)
    tokens = max(1, count // 2)
    batch = Batch(tokens, tokens, 1)
    found = dispatcher.dispatch(batch)
    graph = wrapper.entries[found.descriptor].parts[0]

    def step() -> None:
        with dispatcher.step(batch):
            wrapper(buffer)

    def new_step() -> None:
        with dispatcher.step(Batch(tokens, tokens, 1)):
            wrapper(buffer)

    too_large = Batch(TOO_LARGE, TOO_LARGE, 1)
    bare, dispatch, built, miss, whole, new = measure(
        lambda: graph.replay(),
        lambda: dispatcher.dispatch(batch),
        lambda: dispatcher.dispatch(Batch(tokens, tokens, 1)),
        lambda: dispatcher.dispatch(too_large),
        step,
        new_step,
    )
    (empty,) = measure(lambda: None)
    return {
        "bare replay": bare - empty,
        "dispatch": dispatch - empty,
        "dispatch + building its Batch": built - empty,
        "dispatch, a miss": miss - empty,
        "dispatch + context + wrapper": whole - bare,
        "the same, building its Batch": new - bare,
        "step / bare replay": (whole - empty) / (bare - empty),
    }


def piecewise_step(platform: Any, measure: Measure = measure) -> dict[str, float]:
    """What a segment of a breakable step and a separate piece cost, above bare replays."""
    nothing = eager_break(lambda x: None)

    def broken(x: torch.Tensor) -> torch.Tensor:
        for _ in range(PIECES - 1):
            x.add_(1)
            nothing(x)
        return x.add_(1)

    pool = GraphPool(platform)
    wrap = wrapper_class(platform)
    descriptor = BatchDescriptor(1)
    x = torch.zeros(1, 8, device=platform.device_type)
    breakable = wrap(broken, GraphMode.PIECEWISE, pool=pool, breakable=True)
    pieces = [wrap(lambda x: x.add_(1), GraphMode.PIECEWISE, pool=pool) for _ in range(PIECES)]

    def model() -> None:
        for piece in pieces:
            piece(x)

    with ForwardContext(GraphMode.PIECEWISE, descriptor, capture=CaptureTransaction(0)):
        breakable(x)
        model()
    graphs = [piece.entries[descriptor].parts[0] for piece in pieces]

    def bare() -> None:
        for graph in graphs:
            graph.replay()

    def bare_with_eager_parts() -> None:
        for graph in graphs:
            graph.replay()
            nothing(x)

    def step(function: Callable[..., Any], *args: Any) -> Callable[[], None]:
        def run() -> None:
            with ForwardContext(GraphMode.PIECEWISE, descriptor, 0):
                function(*args)

        return run

    plain, eager, segments, separate = measure(
        bare, bare_with_eager_parts, step(breakable, x), step(model)
    )
    return {
        "a segment of a breakable step": (segments - eager) / PIECES,
        "a separate piece": (separate - plain) / PIECES,
    }


def host_pieces(platform: Any, measure: Measure = measure) -> dict[str, float]:
    """What a piece that returns a list costs a host with contexts of its own, above its replay."""
    pool, descriptor = GraphPool(platform), BatchDescriptor(1)
    context = ForwardContext(GraphMode.PIECEWISE, descriptor)
    own = {"graphrt": context}
    wrap, options = wrapper_class(platform), GraphOptions(lazy=True)
    pieces = [
        wrap(
            lambda x: [x.add_(1)],
            GraphMode.PIECEWISE,
            pool=pool,
            read_context=lambda: own.get("graphrt"),
            options=options,
        )
        for _ in range(PIECES)
    ]
    x = torch.zeros(1, 8, device=platform.device_type)

    def begun() -> None:
        context.begin_step()
        for piece in pieces:
            piece(x)

    def unbegun() -> None:
        context.token = None
        for piece in pieces:
            piece(x)

    with pool.capture_session():
        begun()
    graphs = [piece.entries[descriptor].parts[0] for piece in pieces]

    def bare() -> None:
        for graph in graphs:
            graph.replay()

    plain, one, each = measure(bare, begun, unbegun)
    return {
        "a piece of a host's step, in a list": (one - plain) / PIECES,
        "the same without begin_step()": (each - plain) / PIECES,
    }


def runner_call(platform: Any) -> dict[str, float]:
    """A whole `GraphRunner` call with five inputs, at a captured size and padded."""
    with decode_runner(platform) as runner:
        runner.capture()
        exact, padded = values(64), values(61)
        wrapper = runner.graphs.owners()[0]
        graph = next(iter(wrapper.entries.values())).parts[0]
        bare, at_size, between = measure(
            lambda: graph.replay(),
            lambda: runner(Batch(64, 64, 1), **exact),
            lambda: runner(Batch(61, 61, 1), **padded),
        )
        with Metrics(runner):
            (observed,) = measure(lambda: runner(Batch(64, 64, 1), **exact))
        device = platform.device_type
        copies = [(value.to(device, copy=True), value) for value in exact.values()]

        def bare_copies() -> None:
            for buffer, value in copies:
                buffer.copy_(value)

        (copied,) = measure(bare_copies)
        return {
            "runner call at a captured size": at_size - bare,
            "runner call, padded": between - bare,
            "runner call, with Metrics on": observed - bare,
            "5 input copies one by one, to compare": copied,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platform", default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    platform = resolve_platform(options.platform)
    results: dict[str, dict[str, float]] = {}
    for count in (1, 51, 500):
        results[f"FULL hit, {count} sizes"] = full_step(platform, count)
    results[f"PIECEWISE, {PIECES} segments"] = piecewise_step(platform)
    results[f"{PIECES} pieces of a host's"] = host_pieces(platform)
    results["GraphRunner"] = runner_call(platform)
    few = results["FULL hit, 51 sizes"]["dispatch + context + wrapper"]
    many = results["FULL hit, 500 sizes"]["dispatch + context + wrapper"]
    results["ratios"] = {"500 sizes / 51 sizes": many / few}
    for title, rows in results.items():
        print(title)
        for name, value in rows.items():
            unit = "   " if "/" in name else " us"
            print(f"  {name:<36}{value:9.3f}{unit}")
    if options.json:
        machine = {
            "platform": platform.name,
            "machine": host_platform.processor() or host_platform.machine(),
            "python": sys.version.split()[0],
            "torch": torch.__version__,
        }
        options.json.write_text(json.dumps({**machine, "microseconds": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
