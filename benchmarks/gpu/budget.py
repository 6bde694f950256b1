"""`Budget(device_bytes=)` alone: bytes predicted after two graphs of each mode, and bytes taken.

    python3 -m benchmarks.gpu.budget [--only 1b moe encoder] [--modes FULL PIECEWISE] [--json FILE]

Four parts for each model and mode, with random weights:

- whole: all sizes under a budget that holds them.
- tight: the pool and half of the executables. `most_bytes` is the most while capturing.
- shorter: the same sizes without the largest, captured.
- report: the same, predicted by the report of "whole" and never captured; against "shorter".

A prediction is right within 10 %, or 8 MiB below 80 MiB (`allowed_bytes`). "each" has mode, tokens,
pool and driver bytes of each graph in the order of captures. A model's parts run in one process: a
kernel that is loaded for the first counts there. It runs on the CPU too:
`--device cpu --small`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import arguments, environment, finish, release_cache
from benchmarks.llama import CONFIGS, Llama
from graphrt import Budget, GraphRunner, InputSpec, eager_break
from graphrt.cli.budget import costs_of_report
from graphrt.core.plan.budget import total_of

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


def _free(device: str) -> int:
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


def _judged(predicted: int, taken: int) -> dict[str, Any]:
    allowed = taken // 10 if taken >= 80 * MIB else 8 * MIB
    return {"allowed_bytes": allowed, "is_within": abs(predicted - taken) <= allowed}


def measure(name: str, modes: list[str], device: str, small: bool) -> dict[str, Any]:
    """All parts of one model, by mode and part."""
    model, sizes, tokens = model_of(name, device, small)
    results: dict[str, Any] = {}
    for mode in modes:
        big = Budget(device_bytes=1 << 40)
        with runner_of(model, mode, sizes, tokens, big, device) as runner:
            whole = captured(runner, device)
            report = runner.report()
        bytes_of = whole["pool_bytes"] + whole["executable_bytes"] // 2
        tight_budget = Budget(device_bytes=bytes_of + 4 * MIB)
        with runner_of(model, mode, sizes, tokens, tight_budget, device) as runner:
            tight = captured(runner, device)
        tight["budget_bytes"] = tight_budget.device_bytes
        tight["is_never_above"] = tight["most_bytes"] <= bytes_of + 4 * MIB
        with runner_of(model, mode, sizes[:-1], tokens, big, device) as runner:
            shorter = captured(runner, device)
            keys = runner.graphs.setup.plan.keys
        costs = costs_of_report(report, keys)
        predicted = int(total_of(costs.values()).amount("device_bytes"))
        by_report = {
            "predicted_bytes": predicted,
            "taken_bytes": shorter["taken_bytes"],
            **_judged(predicted, shorter["taken_bytes"]),
        }
        parts = {"whole": whole, "tight": tight, "shorter": shorter, "report": by_report}
        results |= {f"{name} {mode} {part}": row for part, row in parts.items()}
    return results


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", default=["1b", "moe", "encoder"])
    parser.add_argument("--modes", nargs="+", default=["FULL", "PIECEWISE"])
    parser.add_argument("--small", action="store_true", help="small models and few sizes")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(measure(args.alone, args.modes, args.device, args.small)))
        return 0
    results: dict[str, Any] = {}
    for name in args.only:
        command = [sys.executable, "-m", "benchmarks.gpu.budget", "--device", args.device]
        command += ["--modes", *args.modes, "--alone", name, *(["--small"] if args.small else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:  # the others are measured all the same
            results[f"{name} failed"] = {"exit": done.returncode, "is_within": False}
            continue
        rows: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        results |= rows
        for title, row in rows.items():
            kept = {key: row[key] for key in row if key not in ("each", "predictions")}
            print(f"{title}: {json.dumps(kept)}", flush=True)
        # After each model: one that hangs loses its own figures alone.
        finish("budget", args, environment(args.device), results)
    good = ("is_within", "is_never_above")
    failed = [title for title, row in results.items() if not all(row.get(k, True) for k in good)]
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
