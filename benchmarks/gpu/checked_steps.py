"""What a step costs the host at each level of checks: what `benchmarks.gpu.checks` runs, as a file,
with one tree or another on PYTHONPATH. The last line that it prints is JSON.

In a tree that has no levels there is one contestant, "no levels".
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields, replace
from typing import Any

import torch

from benchmarks.common import median_us, synchronizer
from benchmarks.llama import CONFIGS, Config, Llama
from graphrt import Batch, GraphOptions, GraphRunner

LEVELS = ("off", "capture", "sample", "always")
NO_LEVELS = "no levels"
SIZE = 8
ROUNDS = 320
TRIED = {"sample": 320, "always": 10}
"""Calls of the levels that try steps: one in 64, and all."""


def contestants() -> dict[str, GraphOptions]:
    if any(each.name == "check" for each in fields(GraphOptions)):
        return {level: GraphOptions(check=level) for level in LEVELS}
    return {NO_LEVELS: GraphOptions()}


def measure(config: Config, device: str) -> dict[str, dict[str, float]]:
    """By contestant: median and mean of a call with the device idle before it, in microseconds;
    the first step and the first padded one, until the device is idle, in milliseconds; dispatch
    and the look at the checks alone, in nanoseconds."""
    synchronize = synchronizer(device)
    model = Llama(config, max_batch=SIZE, context=64, device=device)
    exact, padded = model.inputs(SIZE), model.inputs(SIZE - 1)
    found: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        calls: dict[str, Callable[[], Any]] = {}
        lookups: list[tuple[str, str, Callable[[], Any]]] = []
        for name, options in contestants().items():
            runner = stack.enter_context(model.runner("FULL_DECODE_ONLY", [SIZE], options=options))
            started = time.perf_counter()
            runner.capture()
            synchronize()
            found[name] = {"capture_ms": (time.perf_counter() - started) * 1e3}
            for kind, rows, values in (("first", SIZE, exact), ("padded", SIZE - 1, padded)):
                started = time.perf_counter()
                runner(Batch(rows, rows, 1), **values)
                synchronize()
                found[name][f"{kind}_ms"] = (time.perf_counter() - started) * 1e3
            calls[name] = call_of(runner, exact)
            lookups += [(name, kind, function) for kind, function in lookups_of(runner)]
        for name, times in in_turns(calls, synchronize).items():
            found[name]["median_us"] = statistics.median(times)
            found[name]["mean_us"] = statistics.mean(times)
        functions = [function for _, _, function in lookups]
        empty, *each = median_us(lambda: None, *functions, rounds=41, calls=1000)
        for (name, kind, _), value in zip(lookups, each, strict=True):
            found[name][kind] = (value - empty) * 1e3
    return found


def call_of(runner: GraphRunner, values: dict[str, torch.Tensor]) -> Callable[[], Any]:
    return lambda: runner(Batch(SIZE, SIZE, 1), **values)


def lookups_of(runner: GraphRunner) -> list[tuple[str, Callable[[], Any]]]:
    """Dispatch, and dispatch with what a step asks the checks before it is simply replayed."""
    dispatch, batch = runner.dispatcher.dispatch, Batch(SIZE, SIZE, 1)
    found: list[tuple[str, Callable[[], Any]]] = [("dispatch_ns", lambda: dispatch(batch))]
    is_clear = runner._engine.is_clear

    def ask() -> bool:
        hit = dispatch(batch)
        return hit.slot >= 0 and is_clear(hit.slot, batch)

    return [*found, ("dispatch_and_clear_ns", ask)]


def in_turns(
    calls: dict[str, Callable[[], Any]], synchronize: Callable[[], None]
) -> dict[str, list[float]]:
    """Microseconds of single calls; the device is idle before each. Only those that are simply
    replayed take turns, each after a call of its own: what trials leave in the caches of the
    processor would be counted as theirs."""
    times: dict[str, list[float]] = {name: [] for name in calls}

    def time_one(name: str) -> None:
        synchronize()
        started = time.perf_counter()
        calls[name]()
        times[name].append((time.perf_counter() - started) * 1e6)

    order = [name for name in calls if name not in TRIED]
    for _ in range(ROUNDS):
        # Nobody runs always behind the same neighbour.
        order = order[1:] + order[:1]
        for name in order:
            calls[name]()
            time_one(name)
    for name, rounds in TRIED.items():
        for _ in range(rounds if name in calls else 0):
            time_one(name)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--model", choices=list(CONFIGS), required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = CONFIGS[options.model]
    few = replace(config, num_layers=2)
    names = {options.model: config, f"{options.model}, 2 layers": few}
    print(json.dumps({name: measure(each, options.device) for name, each in names.items()}))


if __name__ == "__main__":
    main()
