"""What capturing the default sizes takes, in seconds and MiB: graphrt and loops of one's own.

    python3 -m benchmarks.gpu.capture [--model 1b] [--breakdown] [--next] [--json FILE]

Every contestant runs in a process of its own, several times, all taking turns; figures are
medians. Before the clock starts the model has run eagerly at every size, so that no kernel is
loaded for the first time; with `--cold` only at the largest and the smallest size.
All loops warm each size up once, but for "bare", which does so at the largest alone. They go from
the largest size to the smallest. Seconds end when the device is idle. MiB are what the free memory
of the device and torch's own memory lost and gained, with the allocator's cache emptied before and
after. Then the graphs of the largest and of the smallest size must give what the eager model gives,
bit for bit.
With `--next` graphrt is measured a second time, by `capture_next()`, a decode step after each call:
when the first graph serves, how long the host is held, and what steps take meanwhile. It runs on
the CPU too: `--device cpu --model tiny --sizes 1 8 64`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import (
    arguments,
    environment,
    finish,
    left_out,
    release_cache,
    show,
    synchronizer,
)
from benchmarks.gpu.breakdown import Breakdown
from benchmarks.gpu.byhand import Buffers, FullGraphs, PieceGraphs
from benchmarks.llama import CONFIGS, Llama
from graphrt import Batch, GraphRunner, Reason

ITSELF = (sys.executable, "-m", "benchmarks.gpu.capture")
SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]

BY_HAND = {"full": "FULL by hand", "pieces": "pieces by hand", "both": "both by hand"}
GRAPHRT = {
    "FULL_DECODE_ONLY": "graphrt FULL",
    "PIECEWISE": "graphrt PIECEWISE",
    "FULL_AND_PIECEWISE": "graphrt FULL_AND_PIECEWISE",
}
BARE = {"bare": "FULL by hand, bare"}
TITLES = BARE | {
    name: title
    for pair in zip(BY_HAND.items(), GRAPHRT.items(), strict=True)
    for name, title in pair
}


@dataclass
class Contestant:
    """`capture` is what is timed; `steps` run a batch of a captured size, by kind of graph."""

    capture: Callable[[], None]
    steps: dict[str, Callable[[int, dict[str, Tensor]], Tensor]]
    figures: Callable[[], dict[str, Any]]


@contextmanager
def by_hand(name: str, model: Llama, sizes: list[int]) -> Iterator[Contestant]:
    buffers, pool = Buffers(model, max(sizes)), torch.cuda.graph_pool_handle()
    kinds: dict[str, Any] = {}
    # In the order of graphrt: pieces first.
    if name in ("pieces", "both"):
        kinds["pieces"] = PieceGraphs(model, buffers, pool)
    if name in ("full", "both", "bare"):
        kinds["full"] = FullGraphs(model, buffers, pool, warms_up=name != "bare")

    def capture() -> None:
        for graphs in kinds.values():
            graphs.capture(sizes)

    def step(graphs: Any) -> Callable[[int, dict[str, Tensor]], Tensor]:
        return lambda tokens, values: graphs.step(tokens, values)

    yield Contestant(capture, {kind: step(graphs) for kind, graphs in kinds.items()}, dict)


@contextmanager
def by_graphrt(
    mode: str,
    model: Llama,
    sizes: list[int],
    breakdown: Breakdown | None,
    by_next: bool,
) -> Iterator[Contestant]:
    settings = {} if breakdown is None else breakdown.settings(model.embedding.device.type)
    parts: dict[str, Any] = {}
    with model.runner(mode, sizes, **settings) as runner:

        def capture() -> None:
            if by_next:
                parts.update(capture_by_parts(runner, model, sizes))
            elif breakdown is None:
                runner.capture()
            else:
                with breakdown.measuring():
                    runner.capture()

        def decode(tokens: int, values: dict[str, Tensor]) -> Tensor:
            return runner(Batch(tokens, tokens, 1), **values)

        def mixed(tokens: int, values: dict[str, Tensor]) -> Tensor:
            # Of no known query length, so that FULL graphs of decode batches do not serve it.
            return runner(Batch(tokens, tokens), **values)

        steps = {"decode": decode}
        if mode == "FULL_AND_PIECEWISE":
            steps["mixed"] = mixed

        def figures() -> dict[str, Any]:
            report = runner.report()
            served = {
                f"{key[0].name} {key[1].num_tokens}": count
                for key, count in report.steps.items()
                if count
            }
            return {
                "graphs": len(report.graphs),
                "captured_twice": sum(each.attempts > 1 for each in report.graphs),
                "report_capture_s": report.capture_s,
                "report_pool_mib": _mib(report.pool_bytes),
                "served": served,
                "dropped": getattr(report, "dropped", None),
                **({"by_parts": parts} if parts else {}),
            }

        yield Contestant(capture, steps, figures)


def capture_by_parts(runner: GraphRunner, model: Llama, sizes: list[int]) -> dict[str, Any]:
    """Capture between decode steps of the largest size: padded ones do not repeat themselves, as
    their padding rows read what requests have in the cache. Seconds of the host, until the device
    is idle."""
    synchronize = synchronizer(model.embedding.device.type)
    began, calls, steps, first = time.perf_counter(), [], [], None
    left = 1
    while left:
        started = time.perf_counter()
        left = runner.capture_next().left
        synchronize()
        calls.append(time.perf_counter() - started)
        tokens = max(sizes)
        values = model.inputs(tokens)
        started = time.perf_counter()
        runner(Batch(tokens, tokens, 1), **values)
        synchronize()
        steps.append(time.perf_counter() - started)
        found = runner.last_dispatch
        if first is None and found is not None and found.slot >= 0:
            first = time.perf_counter() - began
    reasons = runner.report().reasons
    return {
        "first_graph_s": first,
        "calls": len(calls),
        "longest_call_s": max(calls),
        "all_calls_s": sum(calls),
        "eager_steps": reasons[Reason.NOT_CAPTURED],
        "slowest_step_s": max(steps),
        "median_step_s": statistics.median(steps),
    }


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One contestant, in this process."""
    device, sizes = options.device, sorted(options.sizes)
    synchronize = synchronizer(device)
    model = Llama(
        CONFIGS[options.model], max_batch=max(sizes), context=options.context, device=device
    )
    with torch.no_grad():
        for tokens in (max(sizes), min(sizes)) if options.cold else sizes:
            model(**{key: value.to(device) for key, value in model.inputs(tokens).items()})
    release_cache(device)
    before = memory(device)
    breakdown = Breakdown() if options.breakdown else None
    found: dict[str, Any] = {}
    with (
        by_hand(name, model, sizes)
        if name in BY_HAND | BARE
        else by_graphrt(name, model, sizes, breakdown, options.next)
    ) as contestant:
        gc.collect()
        synchronize()
        started = time.perf_counter()
        contestant.capture()
        synchronize()
        found["seconds"] = time.perf_counter() - started
        release_cache(device)
        after = memory(device)
        for kind in after:
            found[kind] = after[kind] - before[kind]
        found["equal_to_eager"] = equal_to_eager(model, contestant, sizes)
        found.update(contestant.figures())
    if breakdown is not None and name in GRAPHRT:
        found["breakdown"] = breakdown.shares(found["seconds"])
    return found


def memory(device: str) -> dict[str, float]:
    """MiB in use on the device, and MiB that torch has reserved of it."""
    if device != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "device_mib": (total - free) / 2**20,
        "reserved_mib": torch.cuda.memory_reserved() / 2**20,
    }


def equal_to_eager(model: Llama, contestant: Contestant, sizes: list[int]) -> dict[str, bool]:
    found = {}
    for kind, step in contestant.steps.items():
        for tokens in (max(sizes), min(sizes)):
            values = model.inputs(tokens)
            with torch.no_grad():
                eager = model(
                    **{key: value.to(model.embedding.device) for key, value in values.items()}
                )
            found[f"{kind} {tokens}"] = torch.equal(step(tokens, values), eager)
    return found


def in_process(
    name: str,
    options: argparse.Namespace,
    tree: Path | None = None,
    env: dict[str, str] | None = None,
    by_next: bool = False,
) -> dict[str, Any]:
    """`measure` in a fresh process, of the tree with this root and in this environment."""
    command = [*ITSELF, "--contestant", name, "--device", options.device]
    command += ["--model", options.model, "--context", str(options.context), "--sizes"]
    command += map(str, options.sizes)
    command += [f"--{flag}" for flag in ("breakdown", "cold") if getattr(options, flag)]
    command += ["--next"] if by_next else []
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tree)
    if done.returncode:
        raise SystemExit(f"{TITLES[name]} failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def summarise(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians and ratios, printed as tables."""
    kinds = ["seconds", "device_mib", "reserved_mib", "report_capture_s", "report_pool_mib"]
    results: dict[str, Any] = {}
    for name, found in runs.items():
        medians = {
            kind: statistics.median(run[kind] for run in found)
            for kind in kinds
            if found[0].get(kind) is not None
        }
        equal = all(all(run["equal_to_eager"].values()) for run in found)
        results[name] = {**medians, "equal_to_eager": equal, "runs": found}
    rows = []
    pairs = [*zip(GRAPHRT, BY_HAND, strict=True)]
    for own, reference in [*pairs[:1], *((name, "full") for name in BARE), *pairs[1:]]:
        for name in (reference, own):
            if name in results and "seconds_ratio" not in results[name]:
                result = results[name]
                compared = name == own and reference in results
                ratio = result["seconds"] / results[reference]["seconds"] if compared else None
                result["seconds_ratio"] = ratio
                span = [run["seconds"] for run in result["runs"]]
                rows.append(
                    [TITLES[name], result["seconds"], f"{min(span):.3f} to {max(span):.3f}", ratio]
                    + [result.get(kind) for kind in kinds[1:]]
                    + ["yes" if result["equal_to_eager"] else "NO"]
                )
    columns = ["", "s", "runs", "to by hand", "device MiB", "reserved MiB"]
    show("Capture", [*columns, "report s", "report MiB", "equal"], rows)
    for name, found in runs.items():
        if "breakdown" in found[0]:
            parts = {
                part: [
                    statistics.median(run["breakdown"][part][i] for run in found) for i in (0, 1)
                ]
                for part in found[0]["breakdown"]
            }
            results[name]["breakdown"] = parts
            whole = results[name]["seconds"]
            rows = [
                [part, seconds, f"{seconds / whole:.1%}", int(calls) or None]
                for part, (seconds, calls) in parts.items()
            ]
            show(f"{TITLES[name]}: where the time goes", ["", "s", "share", "calls"], rows)
    return results


def summarise_parts(
    runs: dict[str, list[dict[str, Any]]], whole: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Medians of what `capture_next()` took, beside those of `capture()`."""
    results: dict[str, Any] = {}
    rows = []
    for name, found in runs.items():
        parts = [run["by_parts"] for run in found]
        medians = {kind: statistics.median(each[kind] for each in parts) for kind in parts[0]}
        at_once = statistics.median(run["seconds"] for run in whole[name])
        equal = all(all(run["equal_to_eager"].values()) for run in found)
        results[name] = {
            **medians,
            "to_capture": medians["all_calls_s"] / at_once,
            "first_to_capture": medians["first_graph_s"] / at_once,
            "equal_to_eager": equal,
            "runs": found,
        }
        kinds = ("first_graph_s", "all_calls_s", "to_capture", "calls", "longest_call_s")
        row = [results[name][kind] for kind in (*kinds, "slowest_step_s", "median_step_s")]
        rows.append([TITLES[name], *row, "yes" if equal else "NO"])
    columns = ["first graph serves s", "all calls s", "to capture()", "calls", "longest call s"]
    columns += ["slowest step s", "median step s", "equal"]
    show("capture_next()", ["", *columns], rows)
    return results


def _mib(size: int | None) -> float | None:
    return None if size is None else size / 2**20


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=list(CONFIGS), default="1b")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--breakdown", action="store_true", help="of graphrt; costs a little time")
    parser.add_argument("--cold", action="store_true", help="kernels are loaded by the capture")
    parser.add_argument("--next", action="store_true", help="also by capture_next()")
    parser.add_argument("--only", nargs="+", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--contestant", choices=list(TITLES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        print(json.dumps(measure(options.contestant, options)))
        return
    names = options.only
    if left_out(options.device, [TITLES[name] for name in names if name not in GRAPHRT]):
        names = [name for name in names if name in GRAPHRT]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    parts: dict[str, list[dict[str, Any]]] = {}
    for turn in range(options.repeats):
        for name in names:
            runs[name].append(in_process(name, options))
            seconds = runs[name][-1]["seconds"]
            print(f"run {turn + 1}: {TITLES[name]} {seconds:.3f} s", flush=True)
            if options.next and name in GRAPHRT:
                parts.setdefault(name, []).append(in_process(name, options, by_next=True))
    results = summarise(runs)
    if parts:
        results["by_parts"] = summarise_parts(parts, runs)
    finish("capture", options, environment(options.device), results)


if __name__ == "__main__":
    main()
