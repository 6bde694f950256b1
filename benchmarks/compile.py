"""Cold start, warm start and steady state of compiled modules, for each backend.

    python3 -m benchmarks.compile [--device cpu] [--model small] [--json FILE]

Every start is a process of its own. The cold one finds no caches at all; the warm one finds what
the cold one left in graphrt's compile cache, and nothing else: the compilers' own caches are empty
again. A start is everything from the model in memory to the end of `runner.capture()`, or for
torch.compile to the end of the third call of every batch size; its caches are kept for its warm
start. PyTorch's compiler is imported before, which every start needs ("import"). Seconds; steady
state in milliseconds, medians of rounds in which all take turns.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import arguments, environment, finish, interleaved, show, synchronizer
from benchmarks.gpu.decode import compiled, staged
from benchmarks.llama import CONFIGS, Llama, opaque_attention
from graphrt import Batch, GraphPool
from graphrt.compile import CompileOptions, compile_module

ITSELF = (sys.executable, "-m", "benchmarks.compile")
TORCH = "torch.compile"
INDUCTOR = (
    "torch._inductor.compile_fx",
    "torch._inductor.standalone_compile",
    "torch._inductor.runtime.triton_heuristics",
)
BACKENDS: dict[str, dict[str, Any]] = {
    "eager": {"backend": "eager"},
    "inductor": {"backend": "inductor"},
    "inductor, unpacked": {"backend": "inductor", "save_format": "unpacked"},
    "inductor, sizes tuned": {"backend": "inductor", "compile_sizes": ("capture_sizes",)},
}
DIMS = ["input_ids", "positions", "slot_mapping", "seq_lens"]


def start(backend: str, options: argparse.Namespace) -> dict[str, Any]:
    """One start in this process, and its steady state."""
    device, batches = options.device, sorted(options.batches)
    if device == "cpu":
        # Waiting threads of a busy host would be all that is measured.
        torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Llama(CONFIGS[options.model], max_batch=max(batches), context=128, device=device)
    inputs = {tokens: model.inputs(tokens) for tokens in batches}
    synchronizer(device)()
    steps: dict[str, Any] = {"eager": staged(model, device)}
    imported = time.perf_counter()
    for name in ("torch._dynamo", *(() if backend == "eager" else INDUCTOR)):
        importlib.import_module(name)
    started = time.perf_counter()
    if backend == TORCH:
        steps[TORCH] = compiled(model, device)
        for tokens in reversed(batches):
            for _ in range(3):
                steps[TORCH](tokens, inputs[tokens])
        synchronizer(device)()
        found: dict[str, Any] = {"seconds": time.perf_counter() - started}
    else:
        model.attention = opaque_attention
        pool = GraphPool(device)
        module = compile_module(model, DIMS, pool=pool, options=CompileOptions(**BACKENDS[backend]))
        runner = model.runner("FULL_AND_PIECEWISE", batches, pool=pool)
        runner.capture()
        found = {
            "seconds": time.perf_counter() - started,
            "capture_s": runner.report().capture_s,
            **asdict(module.figures),
        }
        steps["PIECEWISE"] = lambda tokens, values: runner(Batch(tokens, tokens), **values)
        steps["FULL"] = lambda tokens, values: runner(Batch(tokens, tokens, 1), **values)
    found["import_s"] = started - imported
    counters = torch._dynamo.utils.counters
    found["inductor_compilations"] = counters["inductor"]["fxgraph_cache_miss"]
    found["steady_ms"] = {
        tokens: {
            name: each["step"]
            for name, each in interleaved(
                {
                    name: lambda step=step, n=tokens: step(n, inputs[n])  # type: ignore[misc]
                    for name, step in steps.items()
                },
                rounds=options.rounds,
                steps=5,
                singles=1,
                synchronize=synchronizer(device),
            ).items()
        }
        for tokens in batches
    }
    return found


def in_own_process(backend: str, caches: Path, own: Path, arguments: list[str]) -> dict[str, Any]:
    """A start with graphrt's cache in `caches` and the compilers' in `own`."""
    variables = {
        **os.environ,
        "GRAPHRT_CACHE_DIR": str(caches),
        "TORCHINDUCTOR_CACHE_DIR": str(own / "inductor"),
        "TRITON_CACHE_DIR": str(own / "triton"),
    }
    command = [*ITSELF, *arguments, "--only", backend]
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def both_starts(backend: str, arguments: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        caches, first, second = (Path(place) / name for name in ("graphrt", "first", "second"))
        cold = in_own_process(backend, caches, first, arguments)
        # What graphrt keeps must be enough; torch.compile has nothing but its own caches.
        warm = in_own_process(backend, caches, first if backend == TORCH else second, arguments)
    print(f"{backend}: {cold['seconds']:.1f} s, then {warm['seconds']:.1f} s", flush=True)
    whole = [each["seconds"] + each["import_s"] for each in (warm, cold)]
    return {
        "cold": cold,
        "warm": warm,
        "share": warm["seconds"] / cold["seconds"],
        "share_with_import": whole[0] / whole[1],
    }


def summarise(results: dict[str, Any]) -> None:
    show(
        "seconds: cold and warm start, and the share with PyTorch's imports in both",
        ["backend", "cold", "warm", "warm / cold", "import", "share with import"],
        [
            [
                b,
                both["cold"]["seconds"],
                both["warm"]["seconds"],
                both["share"],
                both["warm"]["import_s"],
                both["share_with_import"],
            ]
            for b, both in results.items()
        ],
    )
    show(
        "seconds of the phases, cold and warm",
        ["backend", *PHASES, *PHASES],
        [
            [b, *(both[kind].get(name) for kind in ("cold", "warm") for name in PHASES)]
            for b, both in results.items()
        ],
    )
    show(
        "what ran, cold and warm",
        ["backend", "compiled", "loaded", "in Inductor", "compiled", "loaded", "in Inductor"],
        [
            [b, *(both[kind].get(name) for kind in ("cold", "warm") for name in COUNTS)]
            for b, both in results.items()
        ],
    )
    for backend, both in results.items():
        steady = both["warm"]["steady_ms"]
        names = list(next(iter(steady.values())))
        show(
            f"{backend}: ms a step",
            ["batch", *names],
            [[tokens, *times.values()] for tokens, times in steady.items()],
        )


PHASES = ("trace_s", "compile_s", "capture_s")
COUNTS = ("compilations", "loads", "inductor_compilations")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=list(CONFIGS), default="small")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--backends", nargs="+", default=[*BACKENDS, TORCH])
    parser.add_argument("--only", help="one start in this process; prints a line of JSON")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(start(options.only, options)))
        return
    passed = ["--device", options.device, "--model", options.model]
    passed += ["--rounds", str(options.rounds), "--batches", *map(str, options.batches)]
    results = {backend: both_starts(backend, passed) for backend in options.backends}
    summarise(results)
    finish("compile", options, environment(options.device), results)


if __name__ == "__main__":
    main()
