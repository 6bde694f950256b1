"""What it saves and costs that graphs of equal structure share executables.

    python3 -m benchmarks.gpu.sharing [--model 1b] [--json FILE]

Each row is a process of its own that captures the FULL graphs of the default sizes. "Alternating"
steps change between two sizes at every step, "same" ones do not. Every size is compared with
eager at the same padding, bit for bit, in an order that switches every time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.common import arguments, environment, finish, left_out, release_cache, show
from benchmarks.gpu.capture import SIZES, memory
from benchmarks.llama import CONFIGS, Llama
from graphrt import Batch, GraphOptions, GraphRunner

ITSELF = (sys.executable, "-m", "benchmarks.gpu.sharing")
STEPS = 100


def measure(share: bool, options: argparse.Namespace) -> dict[str, Any]:
    """One setting, in this process."""
    model = Llama(CONFIGS[options.model], max_batch=max(SIZES), context=64, device="cuda")
    with torch.no_grad():
        for tokens in SIZES:
            model(**{name: value.cuda() for name, value in model.inputs(tokens).items()})
    release_cache("cuda")
    before = memory("cuda")
    chosen = GraphOptions(share_executables=share)
    with model.runner("FULL_DECODE_ONLY", SIZES, options=chosen) as runner:
        started = time.perf_counter()
        runner.capture()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        release_cache("cuda")
        after = memory("cuda")
        report = runner.report()
        ends = [SIZES[i // 2] if i % 2 else SIZES[-1 - i // 2] for i in range(len(SIZES))]
        unequal = sum(not equal(model, runner, tokens) for tokens in ends)
        found = {
            "shared": share,
            "capture_s": seconds,
            "device_mib": after["device_mib"] - before["device_mib"],
            "driver_mib": report.driver_bytes / 2**20,
            "saved_mib_estimate": None
            if report.saved_bytes is None
            else report.saved_bytes / 2**20,
            "executables": report.sharing.executables if report.sharing else len(report.graphs),
            "sizes_not_equal_to_eager": unequal,
        }
        for small, large in ((8, 16), (16, 24), (104, 112)):
            found[f"same_{large}_ms"] = steps(model, runner, large, large)
            found[f"alternating_{small}_{large}_ms"] = steps(model, runner, small, large)
        sharing = runner.report().sharing
        if sharing is not None and sharing.switches:
            found["switch_us"] = sharing.switch_s / sharing.switches * 1e6
    return found


@torch.no_grad()
def equal(model: Llama, runner: GraphRunner, tokens: int) -> bool:
    batch, values = Batch(tokens, tokens, 1), model.inputs(tokens)
    replayed = runner(batch, **values).clone()
    assert runner.last_dispatch is not None
    return torch.equal(replayed, runner.run_padded_eagerly(batch, runner.last_dispatch, values))


def steps(model: Llama, runner: GraphRunner, first: int, second: int) -> float:
    """Milliseconds a step when two batch sizes take turns."""
    inputs = [(Batch(n, n, 1), model.inputs(n)) for n in (first, second)]
    for _ in range(2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for step in range(STEPS):
            batch, values = inputs[step % 2]
            runner(batch, **values)
        torch.cuda.synchronize()
        spent = time.perf_counter() - started
    return spent / STEPS * 1e3


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=list(CONFIGS), default="1b")
    parser.add_argument("--share", choices=["no", "yes"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share:
        print(json.dumps(measure(options.share == "yes", options)))
        return
    if left_out(options.device, ["shared executables"]):
        return
    results = []
    for share in ("no", "yes"):
        command = [*ITSELF, "--share", share, "--model", options.model]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout}{done.stderr}")
        results.append(json.loads(done.stdout.splitlines()[-1]))
    names = [name for name in results[1] if name != "shared"]
    rows = [[name.replace("_", " "), *(row.get(name) for row in results)] for name in names]
    show(f"{options.model}, {len(SIZES)} FULL graphs", ["", "own", "shared"], rows)
    finish("sharing", options, environment(options.device), results)


if __name__ == "__main__":
    main()
