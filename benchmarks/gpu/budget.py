"""`Budget(device_bytes=)` alone: bytes predicted after two graphs of each mode, and bytes taken.

    python3 -m benchmarks.gpu.budget [--only 1b moe encoder] [--modes FULL PIECEWISE] [--json FILE]

Four parts for each model and mode, with random weights:

- whole: all sizes under a budget that holds them.
- tight: the pool and half of the executables. `most_bytes` is the most while capturing.
- shorter: the same sizes without the largest, captured.
- report: the same, predicted by the report of "whole" and never captured; against "shorter".

A prediction is right within 10 %, or 8 MiB below 80 MiB (`allowed_bytes`). "each" has mode, tokens,
pool and driver bytes of each graph in the order of captures, and "nodes" how many the largest has.
Each part has a process of its own: a driver keeps chunks of graphs that were destroyed before. It
runs on the CPU too: `--device cpu --small`. With `--limit_s` no part begins later.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import arguments, environment, finish, release_cache
from benchmarks.llama import CONFIGS, Llama
from graphrt import Budget, GraphRunner, InputSpec, eager_break
from graphrt.cli.budget import costs_of_report
from graphrt.core.plan.budget import total_of
from graphrt.core.replay.entry import graphs_of
from graphrt.cuda.driver.nodes import nodes_of

MIB = 1 << 20
SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
SMALL = [1, 2, 4, 8, 16, 24, 32]


@eager_break
def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of each row over its own tokens: [rows, heads, tokens, size]."""
    return F.scaled_dot_product_attention(query, key, value)


class Experts(nn.Module):
    """A sparse MLP, each token by two experts; all experts compute, as shapes are fixed."""

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, inner) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, inner, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        best, which = self.gate(flat).softmax(-1).topk(2)
        weights = torch.zeros(len(flat), len(self.up), dtype=x.dtype, device=x.device)
        weights = weights.scatter(1, which, best)
        each = torch.matmul(F.silu(torch.matmul(flat, self.up)), self.down)
        return (each * weights.t().unsqueeze(-1)).sum(0).view_as(x)


class Layer(nn.Module):
    """A layer of a transformer over the tokens of each row alone."""

    def __init__(self, width: int, heads: int, mlp: nn.Module) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mlp, self.heads = mlp, heads

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(rows, tokens, 3, self.heads, -1)
        attended = attend(*qkv.permute(2, 0, 3, 1, 4).unbind())
        x = x + self.out(attended.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    """Rows of token ids to the mean of their last hidden states."""

    def __init__(self, width: int, heads: int, layers: int, experts: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32000, width)

        def mlp() -> nn.Module:
            if experts:
                return Experts(width, 2 * width, experts)
            inner, gelu = nn.Linear(width, 4 * width), nn.GELU()
            return nn.Sequential(inner, gelu, nn.Linear(4 * width, width))

        self.layers = nn.ModuleList(Layer(width, heads, mlp()) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)


def model_of(name: str, device: str, small: bool) -> tuple[nn.Module, list[int], int | None]:
    """The model, its sizes, and the tokens of a row; None for the Llama."""
    torch.manual_seed(0)
    if name == "1b":
        sizes = SMALL if small else SIZES
        shape = CONFIGS["tiny" if small else "1b"]
        return Llama(shape, max_batch=max(sizes), context=64, device=device), sizes, None
    # width, heads, layers, experts, tokens of a row
    shapes = {"moe": (1024, 16, 12, 8, 1), "encoder": (768, 12, 12, 0, 128)}
    width, heads, layers, experts, tokens = shapes[name]
    sizes = SIZES if name == "moe" else [1, 2, 4, *range(8, 129, 8)]
    if small:
        width, heads, layers, tokens, sizes = 64, 4, 2, min(tokens, 16), SMALL
    dtype = torch.float32 if small else torch.bfloat16
    with torch.device(device):
        model = Transformer(width, heads, layers, experts).to(dtype).eval()
    return model, sizes, tokens


def runner_of(
    model: nn.Module, mode: str, sizes: list[int], tokens: int | None, budget: Budget, device: str
) -> GraphRunner:
    if isinstance(model, Llama):
        return model.runner(mode, sizes, budget=budget)
    return GraphRunner(
        model,
        mode=mode,  # type: ignore[arg-type]
        sizes=sizes,
        inputs={"ids": InputSpec(torch.int64, ("rows", tokens or 1))},
        platform=device,
        budget=budget,
    )


def captured(runner: GraphRunner, device: str) -> dict[str, Any]:
    """Capture; what was predicted after two graphs, and what was taken."""
    release_cache(device)
    driver, free = runner.platform.driver_bytes() or 0, _free(device)
    most, totals = [0], []

    def now() -> int:
        return (runner.pool.bytes() or 0) + sum(
            max(0, each.driver_bytes or 0) for each in runner.graphs.records
        )

    def progress(*_: object) -> None:
        most.append(now())
        totals.append(int(runner.plan.total.amount("device_bytes")))

    began = time.perf_counter()
    with torch.no_grad():
        runner.capture(progress=progress)
    seconds = time.perf_counter() - began
    release_cache(device)
    report = runner.report()
    taken = now()
    return {
        "graphs": len(report.graphs),
        "nodes": _nodes(runner, device),
        "left_out": len(runner.plan.left_out),
        "taken_back": len(runner.graphs.budget.took) - len(report.graphs),
        "capture_s": round(seconds, 3),
        "predicted_bytes": totals[2],
        "taken_bytes": taken,
        "pool_bytes": runner.pool.bytes(),
        "executable_bytes": taken - (runner.pool.bytes() or 0),
        "plan_bytes": int(runner.plan.total.amount("device_bytes")),
        "most_bytes": max(most),
        # By the device alone, kernels and handles of warm-ups included.
        "driver_grew_bytes": (runner.platform.driver_bytes() or 0) - driver,
        "device_grew_bytes": free - _free(device),
        **_judged(totals[2], taken),
        "predictions": totals,
        "each": [
            [each.mode.name, each.descriptor.num_tokens, each.pool_bytes, each.driver_bytes]
            for each in report.graphs
        ],
    }


def _nodes(runner: GraphRunner, device: str) -> int:
    """The nodes of the largest graph."""
    entries = runner.graphs.entries()
    largest = max(entries, key=lambda entry: entry.descriptor.num_tokens)
    graphs: list[Any] = graphs_of(largest.parts)
    if device == "cpu":
        return sum(graph.kernels for graph in graphs)
    return sum(len(nodes_of(graph.raw_cuda_graph())) for graph in graphs)


def _free(device: str) -> int:
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


def _judged(predicted: int, taken: int) -> dict[str, Any]:
    allowed = taken // 10 if taken >= 80 * MIB else 8 * MIB
    return {"allowed_bytes": allowed, "is_within": abs(predicted - taken) <= allowed}


def part_of(
    name: str, mode: str, device: str, small: bool, most_bytes: int, whole: dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """A capture under a budget: its row, its report, and the bytes that the report of the `whole`
    run predicts. With that report the largest size is left out."""
    model, sizes, tokens = model_of(name, device, small)
    sizes, budget = sizes if whole is None else sizes[:-1], Budget(device_bytes=most_bytes)
    with runner_of(model, mode, sizes, tokens, budget, device) as runner:
        row, report = captured(runner, device), runner.report().to_dict()
        costs = costs_of_report(whole or report, runner.graphs.setup.plan.keys)
    return row, report, int(total_of(costs.values()).amount("device_bytes"))


def parts_of(name: str, mode: str, device: str, small: bool) -> dict[str, Any]:
    """All parts of one model and mode, each in a process of its own: the fork of one that has
    imported torch, and not used the device."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "graphrt", "graphrt.cuda", "benchmarks.llama"])

    def part(most_bytes: int, whole: dict[str, Any] | None = None) -> Any:
        with ProcessPoolExecutor(1, context) as process:
            given = name, mode, device, small, most_bytes, whole
            return process.submit(part_of, *given).result()

    whole, report, _ = part(1 << 40)
    budget_bytes = whole["pool_bytes"] + whole["executable_bytes"] // 2 + 4 * MIB
    shorter, _, predicted = part(1 << 40, report)
    tight, _, _ = part(budget_bytes)
    tight["budget_bytes"] = budget_bytes
    tight["is_never_above"] = tight["most_bytes"] <= budget_bytes
    by_report = {"predicted_bytes": predicted, "taken_bytes": shorter["taken_bytes"]}
    by_report |= _judged(predicted, shorter["taken_bytes"])
    parts = {"whole": whole, "tight": tight, "shorter": shorter, "report": by_report}
    return {f"{name} {mode} {part}": row for part, row in parts.items()}


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", default=["1b", "moe", "encoder"])
    parser.add_argument("--modes", nargs="+", default=["FULL", "PIECEWISE"])
    parser.add_argument("--small", action="store_true", help="small models and few sizes")
    parser.add_argument("--limit_s", type=float, default=600.0)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    began = time.perf_counter()
    for name, mode in itertools.product(args.only, args.modes):
        if time.perf_counter() - began > args.limit_s:
            results[f"{name} {mode} not begun"] = {"is_within": False}
            continue
        try:
            rows = parts_of(name, mode, args.device, args.small)
        except Exception as error:  # the others are measured all the same
            rows = {f"{name} {mode} failed": {"error": repr(error)[:500], "is_within": False}}
        results |= rows
        for title, row in rows.items():
            kept = {key: row[key] for key in row if key not in ("each", "predictions")}
            print(f"{title}: {json.dumps(kept)}", flush=True)
        # After each: one that hangs loses its own figures alone.
        finish("budget", args, environment(args.device), results)
    good = ("is_within", "is_never_above")
    failed = [title for title, row in results.items() if not all(row.get(k, True) for k in good)]
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
