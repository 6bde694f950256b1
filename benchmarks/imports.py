"""What importing graphrt costs a program that has imported torch.

    python3 -m benchmarks.imports [--runs 10] [--json FILE]
    PYTHONPATH=OTHER python3 benchmarks/imports.py      # of the graphrt in another tree

Each figure is CPU time of a fresh process, the garbage collector left alone and all bytecode in a
cache of its own; programs take turns, and a row has the medians of their runs. "torch" is `import
torch` in the same processes. "full" is how many full collections the import ran: each walks all
objects of torch too, and costs about as much as half of graphrt. What a name does not need is
loaded when something does; the last row is the import together with a first runner, its capture
and its first step.

Below are the modules of the first row that take longest by themselves, as `-X importtime` says in
wall time: the shortest of the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROGRAMS = {
    "GraphRunner, Plan": "from graphrt import GraphRunner, Plan",
    "all public names": "from graphrt import *; import graphrt.platforms, graphrt.types",
    "graphrt.compile": "import graphrt.compile",
    "a first step": """
from graphrt import Batch, GraphRunner, InputSpec
inputs = {"input": InputSpec(torch.float32, ("tokens", 8))}
runner = GraphRunner(torch.nn.Linear(8, 8), inputs=inputs, sizes=[4], mode="FULL", platform="cpu")
runner.capture()
runner(Batch(4, 4), input=torch.zeros(4, 8))
""",
}

_MEASURED = """
import gc, json, sys, time
started = time.process_time()
import torch
torch_s = time.process_time() - started
before, full = set(sys.modules), gc.get_stats()[2]["collections"]
started = time.process_time()
{program}
seconds = time.process_time() - started
print(json.dumps({{
    "torch_ms": torch_s * 1e3, "graphrt_ms": seconds * 1e3,
    "modules": len(set(sys.modules) - before),
    "full": gc.get_stats()[2]["collections"] - full,
}}))
"""

_LISTED = 10


def measured(program: str, environ: Mapping[str, str]) -> dict[str, float]:
    """The figures of one process."""
    code = _MEASURED.format(program=program)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def slowest(program: str, environ: Mapping[str, str], runs: int) -> list[tuple[str, float]]:
    """The modules that take longest by themselves, with their milliseconds."""
    best: dict[str, float] = {}
    for _ in range(runs):
        for name, own_ms in module_times(program, environ):
            best[name] = min(own_ms, best.get(name, own_ms))
    return sorted(best.items(), key=lambda row: -row[1])[:_LISTED]


def module_times(program: str, environ: Mapping[str, str]) -> list[tuple[str, float]]:
    """The milliseconds that each module takes by itself in one process."""
    code = f"import sys, torch; print('after torch', file=sys.stderr, flush=True)\n{program}"
    command = [sys.executable, "-X", "importtime", "-c", code]
    done = subprocess.run(command, env=environ, stderr=subprocess.PIPE, text=True, check=True)
    lines = done.stderr.partition("after torch")[2].strip().splitlines()
    rows = (line.removeprefix("import time:").split("|") for line in lines)
    return [(name.strip(), int(own) / 1e3) for own, _, name in rows]


def figures(runs: int, environ: Mapping[str, str]) -> dict[str, Any]:
    for program in PROGRAMS.values():
        measured(program, environ)  # which writes the bytecode
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in PROGRAMS}
    for _ in range(runs):
        for name, program in PROGRAMS.items():
            rows[name].append(measured(program, environ))
    return {
        "runs": runs,
        "programs": {
            name: {key: statistics.median(each[key] for each in row) for key in row[0]}
            for name, row in rows.items()
        },
        "slowest_modules": slowest(next(iter(PROGRAMS.values())), environ, runs),
    }


def print_tables(found: Mapping[str, Any]) -> None:
    print(f"{'':18} {'torch ms':>9} {'graphrt ms':>11} {'modules':>8} {'full':>5}")
    for name, row in found["programs"].items():
        print(
            f"{name:18} {row['torch_ms']:9.0f} {row['graphrt_ms']:11.1f} {row['modules']:8.0f} "
            f"{row['full']:5.0f}"
        )
    print("\nslowest modules, ms")
    for name, own_ms in found["slowest_modules"]:
        print(f"{own_ms:6.2f}  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10, help="Processes of each program.")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        environ = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        found = figures(given.runs, environ)
    print_tables(found)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
