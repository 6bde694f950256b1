"""A whole decode step with its inputs on the host: eager, graphrt, torch.compile and by hand.

    python3 -m benchmarks.gpu.decode [--model 1b 8b] [--json FILE]

Figures are medians over rounds in which all contestants take turns. The floor is the time in which
a copy of the same device moves as many bytes as the step must read: all weights once (of the
embedding table only the rows of the batch, unless it is the head too) and the whole context of
every request.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import (
    arguments,
    copy_bandwidth,
    environment,
    finish,
    interleaved,
    left_out,
    release_cache,
    show,
    synchronizer,
)
from benchmarks.gpu.byhand import Buffers, FullGraphs
from benchmarks.llama import CONFIGS, Llama
from graphrt import Batch

Contestant = Callable[[int, dict[str, Tensor]], Tensor]

EAGER, FULL, PIECEWISE = "eager", "graphrt FULL", "graphrt PIECEWISE"
COMPILE, BY_HAND = "torch.compile", "by hand"
EXACT = (FULL, PIECEWISE, BY_HAND)


def staged(model: Any, device: str) -> Contestant:
    """The model called with copies of the inputs on the device."""

    def step(tokens: int, values: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return model(
                **{name: value.to(device, non_blocking=True) for name, value in values.items()}
            )

    return step


def compiled(model: Llama, device: str) -> Contestant:
    for layer in model.layers:
        torch._dynamo.mark_static_address(layer.keys)
        torch._dynamo.mark_static_address(layer.values)
    inner = staged(torch.compile(model, mode="reduce-overhead", dynamic=True), device)

    def step(tokens: int, values: dict[str, Tensor]) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return inner(tokens, values)

    return step


def compile_all(
    step: Contestant, inputs: dict[int, dict[str, Tensor]], device: str
) -> dict[str, Any]:
    """Compile, warm up and record every batch, and say what that took."""
    synchronize, seconds = synchronizer(device), {}
    # Last the batch of one: its code is of another shape in any case.
    for tokens in sorted(inputs, reverse=True):
        started = time.perf_counter()
        # The first call compiles, the second records a graph, the third replays it.
        for _ in range(3):
            step(tokens, inputs[tokens])
        synchronize()
        seconds[tokens] = time.perf_counter() - started
    stats = torch._dynamo.utils.counters["stats"]
    return {
        "seconds": sum(seconds.values()),
        "seconds_by_batch": seconds,
        "compilations": stats.get("unique_graphs"),
        "graph_breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        "cudagraph_skips": torch._dynamo.utils.counters["inductor"].get("cudagraph_skips", 0),
    }


def compare(
    steps: dict[str, Contestant], tokens: int, values: dict[str, Tensor]
) -> dict[str, dict[str, Any]]:
    """How the logits of each contestant differ from eager ones of the same batch."""
    eager = steps[EAGER](tokens, values)
    found: dict[str, dict[str, Any]] = {"finite": {EAGER: bool(eager.isfinite().all())}}
    for name, step in steps.items():
        if name != EAGER:
            logits = step(tokens, values)
            found[name] = {
                "equal": torch.equal(logits, eager),
                "max_abs_difference": (logits.float() - eager.float()).abs().max().item(),
            }
    return found


def benchmark(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """All batches of one model; frees what it made."""
    device, batches = options.device, sorted(options.batches)
    torch._dynamo.utils.counters.clear()
    started = time.perf_counter()
    model = Llama(CONFIGS[name], max_batch=max(batches), context=options.context, device=device)
    inputs = {tokens: model.inputs(tokens) for tokens in batches}
    bandwidth = copy_bandwidth(device)
    release_cache(device)
    steps: dict[str, Contestant] = {EAGER: staged(model, device)}
    result: dict[str, Any] = {"copy_bytes_per_s": bandwidth, "left_out": {}, "batches": {}}
    with (
        model.runner("FULL_DECODE_ONLY", batches) as full,
        model.runner("PIECEWISE", batches) as pieces,
    ):
        for title, runner in ((FULL, full), (PIECEWISE, pieces)):
            runner.capture()
            steps[title] = lambda tokens, values, runner=runner: runner(
                Batch(tokens, tokens, 1), **values
            )
        if not left_out(device, [BY_HAND]):
            pinned = {
                tokens: {key: value.pin_memory() for key, value in values.items()}
                for tokens, values in inputs.items()
            }
            graphs = FullGraphs(model, Buffers(model, max(batches)), torch.cuda.graph_pool_handle())
            graphs.capture(batches)
            steps[BY_HAND] = lambda tokens, values: graphs.step(tokens, pinned[tokens])
        if options.compile:
            try:
                step = compiled(model, device)
                result["compile"] = compile_all(step, inputs, device)
                steps[COMPILE] = step
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                result["left_out"][COMPILE] = reason
                print(f"left out: {COMPILE} ({reason})")
        print(f"{name}: prepared in {time.perf_counter() - started:.1f} s", flush=True)
        for tokens in batches:
            row = measured(steps, tokens, inputs[tokens], options)
            row["floor_ms"] = model.bytes_read(tokens) / bandwidth * 1e3
            result["batches"][tokens] = row
        result["runners"] = {
            title: described(runner.report())
            for title, runner in ((FULL, full), (PIECEWISE, pieces))
        }
    result["seconds"] = time.perf_counter() - started
    return result


def measured(
    steps: dict[str, Contestant],
    tokens: int,
    values: dict[str, Tensor],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """The comparison and then the times of one batch."""
    logits = compare(steps, tokens, values)
    times = interleaved(
        {
            name: lambda step=step: step(tokens, values)  # type: ignore[misc]
            for name, step in steps.items()
        },
        rounds=options.rounds,
        steps=options.steps,
        singles=options.singles,
        synchronize=synchronizer(options.device),
    )
    return {"logits": logits, "ms": times}


def described(report: Any) -> dict[str, Any]:
    """What a runner counted, as far as this version of it does."""
    names = ("capture_s", "pool_bytes", "dropped", "staging_waits")
    found = {name: getattr(report, name, None) for name in names}
    found["reasons"] = {reason.name: count for reason, count in report.reasons.items() if count}
    return found


def summarise(name: str, result: dict[str, Any]) -> None:
    """Ratios into `result`, and its tables."""
    batches = result["batches"]
    contestants = list(next(iter(batches.values()))["ms"])
    for row in batches.values():
        ms = {title: times["step"] for title, times in row["ms"].items()}
        row["share_of_floor"] = {title: row["floor_ms"] / value for title, value in ms.items()}
        row["ratios"] = {
            f"{title} / {other}": ms[title] / ms[other]
            for title, other in ((FULL, BY_HAND), (FULL, COMPILE), (EAGER, FULL), (PIECEWISE, FULL))
            if title in ms and other in ms
        }
    gbs = result["copy_bytes_per_s"] / 1e9
    for kind, title in (
        ("step", f"floor at {gbs:.0f} GB/s; ms a step, back to back"),
        ("enqueue", "ms of the host to enqueue a step"),
        ("latency", "ms of a single step and its wait"),
    ):
        columns = ["batch", *(["floor"] if kind == "step" else []), *contestants]
        rows = [
            [tokens, *([row["floor_ms"]] if kind == "step" else [])]
            + [row["ms"][contestant][kind] for contestant in contestants]
            for tokens, row in batches.items()
        ]
        show(f"{name}: {title}", columns, rows)
    show(
        f"{name}: share of the floor",
        ["batch", *contestants],
        [[tokens, *row["share_of_floor"].values()] for tokens, row in batches.items()],
    )
    ratios = list(next(iter(batches.values()))["ratios"])
    show(
        f"{name}: ratios of steps",
        ["batch", *ratios],
        [[tokens, *row["ratios"].values()] for tokens, row in batches.items()],
    )
    exact = [title for title in contestants if title in EXACT]
    unequal = [
        f"{title} at {tokens}"
        for tokens, row in batches.items()
        for title in exact
        if not row["logits"][title]["equal"]
    ]
    result["bit_equal_to_eager"] = not unequal
    print(f"equal to eager bit for bit: {'all' if not unequal else 'NOT ' + ', '.join(unequal)}")
    finite = all(row["logits"]["finite"][EAGER] for row in batches.values())
    print(f"eager logits are {'finite' if finite else 'NOT finite'}")
    if COMPILE in contestants:
        worst = max(row["logits"][COMPILE]["max_abs_difference"] for row in batches.values())
        print(
            f"{COMPILE}: {result['compile']['seconds']:.1f} s for all batches, "
            f"largest difference from eager {worst:.3g}"
        )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", nargs="+", choices=list(CONFIGS), default=["1b", "8b"])
    parser.add_argument(
        "--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128, 256]
    )
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20, help="back to back in a round")
    parser.add_argument("--singles", type=int, default=3, help="with a wait each, in a round")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name in options.model:
        results[name] = benchmark(name, options)
        torch._dynamo.reset()
        gc.collect()
        release_cache(options.device)
        if options.device == "cuda":
            results[name]["mib_left"] = torch.cuda.memory_reserved() / 2**20
        summarise(name, results[name])
    finish("decode", options, environment(options.device), results)


if __name__ == "__main__":
    main()
