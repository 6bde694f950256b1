"""A compiled decode step: the whole graph in FULL, pieces, layer.compile(), reduce-overhead.

    python3 -m benchmarks.gpu.compiled_modes [--json FILE] [--model 1b] [--only REGEX]

All contestants are made in one process and take turns (batches 1, 16 and 64). Attention is an
opaque operator, as in engines, except for the contestants whose name says otherwise. A start here
shares compiler caches with those before it: starts are measured by `benchmarks/compile.py`.
"""

from __future__ import annotations

import copy
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import common
from benchmarks.common import interleaved
from benchmarks.gpu.decode import staged
from benchmarks.llama import CONFIGS, Llama, attend, opaque_attention
from graphrt import Batch, GraphPool, GraphRunner
from graphrt.compile import CompileOptions, compile_module
from graphrt.demo import finish, project

BATCHES = [1, 16, 64]
DIMS = ["input_ids", "positions", "slot_mapping", "seq_lens"]
Step = Callable[[int, dict[str, Tensor]], Tensor]


class Block(nn.Module):
    """One layer as a module: `torch.compile` compiles blocks, and equal ones once."""

    def __init__(self, layer: Any, config: Any) -> None:
        super().__init__()
        self.layer, self.config = layer, config

    def forward(self, hidden, cos, sin, rows, columns, visible):  # type: ignore[no-untyped-def]
        layer = self.layer
        qkv = project(layer, self.config, hidden, cos, sin)
        mixed = attend(*qkv, layer.keys, layer.values, rows, columns, visible)
        return finish(layer, self.config, hidden, mixed)


class Blocks(nn.Module):
    """The same model of blocks, over the same weights."""

    def __init__(self, llama: Llama) -> None:
        super().__init__()
        self.llama = llama
        self.blocks = nn.ModuleList(Block(layer, llama.config) for layer in llama.layers)

    def forward(self, input_ids, positions, slot_mapping, seq_lens):  # type: ignore[no-untyped-def]
        hidden, shared = self.llama.start(input_ids, positions, slot_mapping, seq_lens)
        for block in self.blocks:
            hidden = block(hidden, shared.cos, shared.sin, *shared[:3])
        return self.llama.logits(hidden)


def with_attention(model: Llama, attention: Any) -> Llama:
    other = copy.copy(model)
    other.attention = attention
    return other


def by_graphrt(
    model: Llama, device: str, cache: str, mode: str, **more: Any
) -> tuple[GraphRunner, dict]:
    pool = GraphPool(device)
    options = CompileOptions(backend="inductor", cache_dir=cache, **more)
    opaque = with_attention(model, opaque_attention)
    module = compile_module(opaque, DIMS, options=options, pool=pool, in_place=False)
    runner = model.runner(mode, BATCHES, forward=module, pool=pool)
    runner.capture()
    return runner, {"figures": asdict(module.figures)}


def by_layers(model: Llama) -> GraphRunner:
    blocks = Blocks(model)
    for block in blocks.blocks:
        block.compile(dynamic=True)
    runner = model.runner("FULL", BATCHES, forward=blocks)
    runner.capture()
    return runner


def by_torch(model: Llama, device: str) -> Step:
    for layer in model.layers:
        torch._dynamo.mark_static_address(layer.keys)
        torch._dynamo.mark_static_address(layer.values)
    whole = torch.compile(with_attention(model, attend), mode="reduce-overhead", dynamic=True)
    inner = staged(whole, device)

    def step(tokens: int, values: dict[str, Tensor]) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return inner(tokens, values)

    for tokens in sorted(BATCHES, reverse=True):
        for _ in range(3):
            step(tokens, model.inputs(tokens))
    return step


def decode(runner: GraphRunner, query_len: int | None, tokens: int, values: dict) -> Tensor:
    return runner(Batch(tokens, tokens, query_len), **values)


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--model", default="1b", choices=CONFIGS)
    parser.add_argument("--only", default=".", help="regular expression on names")
    args = parser.parse_args()
    sync = common.synchronizer(args.device)
    model = Llama(CONFIGS[args.model], max_batch=max(BATCHES), context=512, device=args.device)
    made: dict[str, Any] = {}
    steps: dict[str, Step] = {}
    with tempfile.TemporaryDirectory() as cache:
        makers: dict[str, Callable[[], Any]] = {
            "FULL_AND_PIECEWISE": partial(
                by_graphrt, model, args.device, cache, "FULL_AND_PIECEWISE"
            ),
            "FULL, full=pieces": partial(
                by_graphrt, model, args.device, cache, "FULL", full="pieces"
            ),
            "layer.compile() in FULL, attention too": lambda: (by_layers(model), {}),
            "reduce-overhead, attention too": lambda: (by_torch(model, args.device), {}),
        }
        for name, make in makers.items():
            if not re.search(args.only, name):
                continue
            began = time.perf_counter()
            step, made[name] = make()
            sync()
            made[name]["seconds"] = time.perf_counter() - began
            print(f"{name}: made in {made[name]['seconds']:.1f} s", flush=True)
            if not isinstance(step, GraphRunner):
                steps[name] = step
            elif name == "FULL_AND_PIECEWISE":
                steps["FULL, whole graph"] = partial(decode, step, 1)
                steps["PIECEWISE"] = partial(decode, step, None)
            else:
                steps[name] = partial(decode, step, 1)
        rows = {}
        for tokens in BATCHES:
            values = model.inputs(tokens)
            calls = {name: partial(step, tokens, values) for name, step in steps.items()}
            rows[tokens] = interleaved(calls, rounds=7, steps=20, singles=2, synchronize=sync)
            print(tokens, {name: round(each["step"], 3) for name, each in rows[tokens].items()})
    common.finish(
        "compiled_modes", args, common.environment(args.device), {"made": made, "ms": rows}
    )


if __name__ == "__main__":
    main()
