"""The memory of all graphs, predicted from the first two that are captured, beside what they took.

    python3 -m benchmarks.gpu.memory_predicted [--only 1b moe] [--modes FULL] [--json FILE]

Models of transformers with random weights: a Llama of 1B and a small Mixtral, one token a row. Each
pair of model and mode is captured in a process of its own, as kernels that are loaded for one would
be there for the next. A prediction is right within 10 % or 64 MiB, the larger (`allowed_bytes`);
"first" is the one after two graphs, "fourth" after four, and every graph is listed with what it
took. It runs on the CPU too: `--device cpu --only tiny tiny-moe`,
or `--only 1b moe --sizes 8 64 128 256`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import torch

from benchmarks.common import arguments, environment, finish
from graphrt import GraphRunner, InputSpec
from graphrt.observe import MemoryWatch

SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
LLAMA = ("LlamaConfig", "LlamaForCausalLM")
MIXTRAL = ("MixtralConfig", "MixtralForCausalLM")
MODELS: dict[str, tuple[tuple[str, str], dict[str, int], list[int]]] = {
    "1b": (
        LLAMA,
        {
            "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
            "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        },
        SIZES,
    ),
    "moe": (
        MIXTRAL,
        {
            "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 1792,
            "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4,
            "num_local_experts": 8,
        },
        SIZES,
    ),
    "tiny": (
        LLAMA,
        {
            "vocab_size": 8000, "hidden_size": 256, "intermediate_size": 1024,
            "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
        },
        [1, 8, 32, 64, 96, 128],
    ),
    "tiny-moe": (
        MIXTRAL,
        {
            "vocab_size": 8000, "hidden_size": 256, "intermediate_size": 512,
            "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
            "num_local_experts": 8,
        },
        [1, 8, 32, 64, 96, 128],
    ),
}  # fmt: skip


def measure(name: str, mode: str, device: str, sizes: list[int] | None) -> dict[str, Any]:
    """Capture one model; what was predicted and what it took."""
    import transformers

    (config_class, model_class), shape, listed = MODELS[name]
    sizes = sizes or listed
    config = getattr(transformers, config_class)(**shape)
    torch.manual_seed(0)
    with torch.device(device):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = getattr(transformers, model_class)._from_config(config, dtype=dtype).eval()

    def forward(ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(ids.unsqueeze(1), use_cache=False).logits[:, -1]
        return logits

    runner = GraphRunner(
        forward,
        mode=mode,  # type: ignore[arg-type]
        sizes=sizes,
        max_num_tokens=max(sizes),
        max_num_reqs=max(sizes),
        inputs={"ids": InputSpec(torch.int64, ("tokens",))},
        platform=None if device == "cuda" else device,
    )
    watch = MemoryWatch(runner)
    with torch.no_grad():
        runner.capture(progress=watch)
    report = runner.report()
    real = (report.pool_bytes or 0) + (report.driver_bytes or 0)
    allowed = max(real // 10, 64 << 20)
    first, fourth = watch.forecasts[0], watch.forecasts[min(2, len(watch.forecasts) - 1)]
    return {
        "graphs": len(report.graphs),
        "capture_s": round(report.capture_s, 3),
        "pool_bytes": report.pool_bytes,
        "driver_bytes": report.driver_bytes,
        "real_bytes": real,
        "predicted_first_bytes": first.bytes,
        "predicted_fourth_bytes": fourth.bytes,
        "allowed_bytes": allowed,
        "is_within": abs(first.bytes - real) <= allowed,
        "fourth_is_within": abs(fourth.bytes - real) <= allowed,
        "predictions": [each.bytes for each in watch.forecasts],
        "each": [
            [each.mode.name, each.descriptor.num_tokens, each.pool_bytes, each.driver_bytes]
            for each in report.graphs
        ],
    }


def measured(name: str, mode: str, device: str, sizes: list[int] | None) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu.memory_predicted", "--device", device]
    if sizes:
        command += ["--sizes", *map(str, sizes)]
    done = subprocess.run(
        [*command, "--alone", name, mode], stdout=subprocess.PIPE, text=True, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=["1b", "moe"])
    parser.add_argument("--modes", nargs="+", default=["FULL", "FULL_AND_PIECEWISE"])
    parser.add_argument("--sizes", nargs="+", type=int, help="instead of those of the model")
    parser.add_argument("--alone", nargs=2, metavar=("MODEL", "MODE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(measure(*args.alone, args.device, args.sizes)))
        return 0
    results: dict[str, Any] = {}
    for name in args.only:
        for mode in args.modes:
            row = results[f"{name} {mode}"] = measured(name, mode, args.device, args.sizes)
            shown = {key: row[key] for key in row if key not in ("each", "predictions")}
            print(f"{name} {mode}: {json.dumps(shown)}", flush=True)
    finish("memory_predicted", args, environment(args.device), results)
    return 0 if all(row["is_within"] for row in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
