"""Compiled pieces against breakable eager ones, and FULL against torch.compile's own graphs.

    python3 -m benchmarks.gpu.compiled [--model 1b] [--json FILE]

One decode step of a Llama-shaped model with its inputs on the host, at every batch size. Figures
are medians over rounds in which all contestants take turns.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import (
    arguments,
    environment,
    finish,
    interleaved,
    show,
    synchronizer,
)
from benchmarks.gpu.decode import compile_all, compiled, staged
from benchmarks.llama import CONFIGS, Llama, opaque_attention
from graphrt import Batch, GraphPool
from graphrt.compile import CompileOptions, compile_module

EAGER, TORCH = "eager", "torch.compile"
BREAKABLE, BREAKABLE_FULL = "breakable pieces", "FULL"
DIMS = ["input_ids", "positions", "slot_mapping", "seq_lens"]
INDUCTOR = CompileOptions(backend="inductor")
VARIANTS = {
    "eager fx": CompileOptions(backend="eager"),
    "inductor": INDUCTOR,
    "inductor, pieces alone": replace(INDUCTOR, full="pieces"),
    "inductor, one wrapper": INDUCTOR,
    "inductor partition": replace(INDUCTOR, use_inductor_graph_partition=True),
    "inductor, whole graph": replace(INDUCTOR, splitting_ops=()),
}
"""FULL graphs run the whole graph with its opaque attention, or with pieces alone their code.
In one wrapper, pieces are segments of a breakable capture. The last has compiled attention too, as
torch.compile has."""


class Contestants:
    """Everything that runs a step: by name a function of the batch size and its inputs."""

    def __init__(self, model: Llama, batches: list[int], options: argparse.Namespace) -> None:
        self.steps: dict[str, Any] = {EAGER: staged(model, options.device)}
        self.prepared: dict[str, Any] = {}
        self._model, self._batches, self._options = model, batches, options
        self._stack = ExitStack()
        runner = self._runner(model)
        started = time.perf_counter()
        runner.capture()
        self.prepared[BREAKABLE] = {"capture_s": time.perf_counter() - started}
        self.steps[BREAKABLE] = _step(runner, None)
        self.steps[BREAKABLE_FULL] = _step(runner, 1)
        self._split = copy.copy(model)
        self._split.attention = opaque_attention

    def add_compiled(self, name: str, options: CompileOptions) -> None:
        """PIECEWISE and FULL of one compiled module."""
        pool = GraphPool(self._options.device)
        own = None if "one wrapper" in name else pool
        model = self._model if options.whole_graph else self._split
        module = compile_module(model, DIMS, options=options, pool=own, in_place=False)
        runner = self._runner(module, pool=pool)
        started = time.perf_counter()
        runner.capture()
        self.prepared[name] = {
            "seconds": time.perf_counter() - started,
            "mode": runner.mode.name,
            "figures": asdict(module.figures),
            "wrappers": len(module.wrappers),
        }
        if runner.mode.has_piecewise:
            self.steps[f"{name} pieces"] = _step(runner, None)
        self.steps[f"{name} FULL"] = _step(runner, 1)

    def add_torch_compile(self, inputs: dict[int, dict[str, Tensor]]) -> None:
        step = compiled(self._model, self._options.device)
        self.prepared[TORCH] = compile_all(step, inputs, self._options.device)
        self.steps[TORCH] = step

    def close(self) -> None:
        self._stack.close()

    def _runner(self, forward: Any, **more: Any) -> Any:
        return self._stack.enter_context(
            self._model.runner("FULL_AND_PIECEWISE", self._batches, forward=forward, **more)
        )


def _step(runner: Any, query_len: int | None) -> Any:
    return lambda tokens, values: runner(Batch(tokens, tokens, query_len), **values)


def benchmark(name: str, options: argparse.Namespace) -> dict[str, Any]:
    batches = sorted(options.batches)
    model = Llama(
        CONFIGS[name], max_batch=max(batches), context=options.context, device=options.device
    )
    inputs = {tokens: model.inputs(tokens) for tokens in batches}
    contestants = Contestants(model, batches, options)
    left_out: dict[str, str] = {}
    try:
        for variant in options.variants:
            _try(variant, left_out, contestants.add_compiled, variant, VARIANTS[variant])
        if options.torch_compile:
            _try(TORCH, left_out, contestants.add_torch_compile, inputs)
        rows = {
            tokens: _measured(contestants.steps, tokens, inputs[tokens], options)
            for tokens in batches
        }
        return {"batches": rows, "prepared": contestants.prepared, "left_out": left_out}
    finally:
        contestants.close()


def _try(title: str, left_out: dict[str, str], add: Any, *args: Any) -> None:
    """A contestant that cannot be built is named and left out; the others run."""
    started = time.perf_counter()
    try:
        add(*args)
    except Exception as error:
        left_out[title] = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"left out: {title} ({left_out[title]})", flush=True)
    else:
        print(f"{title}: prepared in {time.perf_counter() - started:.1f} s", flush=True)


def _measured(
    steps: dict[str, Any], tokens: int, values: dict[str, Tensor], options: argparse.Namespace
) -> dict[str, Any]:
    eager = steps[EAGER](tokens, values).clone()
    logits = {}
    for name, step in steps.items():
        found = step(tokens, values)
        logits[name] = {
            "equal": torch.equal(found, eager),
            "max_abs_difference": (found.float() - eager.float()).abs().max().item(),
            "max_abs": eager.abs().max().item(),
        }
    times = interleaved(
        {name: lambda step=step: step(tokens, values) for name, step in steps.items()},  # type: ignore[misc]
        rounds=options.rounds,
        steps=options.steps,
        singles=options.singles,
        synchronize=synchronizer(options.device),
    )
    return {"logits": logits, "ms": times}


def pairs(contestants: list[str]) -> Iterator[tuple[str, str]]:
    """Whose time is divided by whose: pieces by breakable pieces, FULL by torch.compile's."""
    for name in contestants:
        if name.endswith(" pieces") and name != BREAKABLE:
            yield name, BREAKABLE
    for name in contestants:
        if name.endswith("FULL") and TORCH in contestants:
            yield name, TORCH


def summarise(name: str, result: dict[str, Any]) -> None:
    rows = result["batches"]
    contestants = list(next(iter(rows.values()))["ms"])
    for kind in ("step", "enqueue", "latency"):
        show(
            f"{name}: ms, {kind}",
            ["batch", *contestants],
            [[tokens, *(row["ms"][c][kind] for c in contestants)] for tokens, row in rows.items()],
        )
    found = list(pairs(contestants))
    for row in rows.values():
        row["ratios"] = {
            kind: {f"{a} / {b}": row["ms"][a][kind] / row["ms"][b][kind] for a, b in found}
            for kind in ("step", "latency")
        }
    for kind in ("step", "latency"):
        show(
            f"{name}: ratios of {kind}",
            ["batch", *(f"{a} / {b}" for a, b in found)],
            [[tokens, *row["ratios"][kind].values()] for tokens, row in rows.items()],
        )
    for contestant in contestants:
        differences = [row["logits"][contestant] for row in rows.values()]
        worst = max(each["max_abs_difference"] for each in differences)
        exact = all(each["equal"] for each in differences)
        print(f"{contestant}: {'equal to eager' if exact else f'at most {worst:.3g} from eager'}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=list(CONFIGS), default="1b")
    parser.add_argument(
        "--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128, 256]
    )
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20, help="back to back in a round")
    parser.add_argument("--singles", type=int, default=3, help="with a wait each, in a round")
    parser.add_argument("--no-torch-compile", dest="torch_compile", action="store_false")
    options = parser.parse_args()
    result = benchmark(options.model, options)
    summarise(options.model, result)
    finish("compiled", options, environment(options.device), result)


if __name__ == "__main__":
    main()
