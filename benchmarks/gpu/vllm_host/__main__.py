"""vLLM's own graphs against graphrt's, in one process each: the same tokens, and what a step costs.

    python -m benchmarks.gpu.vllm_host run --site SITE --work DIR [--only REGEX] [--out FILE]
    python -m benchmarks.gpu.vllm_host memory --site SITE --work DIR --only REGEX [--out FILE]

SITE is a folder with vLLM and what it imports (left out: where Python finds them). Every
configuration is a process of its own, all at once, on the GPUs in turn; in it one engine has
graphrt's graphs and another one vLLM's own. Both generate greedily for the same prompts, then are
timed in turns, one process a GPU at a time. Weights are random normals, so that tokens depend on
attention. `memory` compares the first capture of one engine that has its process, and its GPU, to
itself, as what one engine has made is there for the next one.
"""

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import tomllib

from benchmarks.gpu.vllm_host.configurations import TIMED, configurations
from benchmarks.gpu.vllm_host.model import write_model
from benchmarks.gpu.vllm_host.one import run_alone, run_one

ROOT = Path(__file__).resolve().parents[3]


def entry_points(folder: Path) -> None:
    """Stand in for an installed graphrt: its entry points, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "graphrt-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: graphrt\nVersion: 0.1.0\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))


def prepared(args: argparse.Namespace) -> tuple[Path, list[str], str]:
    """The working directory with a model and adapters, the configurations, and PYTHONPATH."""
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    for old in (*work.glob("*.compared"), *work.glob("*.json")):
        old.unlink()
    write_model(work / "llama")
    entry_points(work / "installed")
    names = [name for name in configurations() if re.search(args.only, name)]
    paths = [str(ROOT), str(work / "installed"), *([str(args.site)] if args.site else [])]
    path = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    if any(configurations()[name].get("lora") for name in names):
        # A process of its own: torch and safetensors may be in SITE alone.
        code = (
            "import sys, pathlib; from benchmarks.gpu.vllm_host.model import write_adapter; "
            "write_adapter(pathlib.Path(sys.argv[1]))"
        )
        subprocess.run(
            [sys.executable, "-c", code, str(work / "adapter")],
            env=os.environ | {"PYTHONPATH": path},
            check=True,
        )
    return work, names, path


def started(
    name: str, work: Path, path: str, gpu: int, log: Path, *more: str
) -> subprocess.Popen[bytes]:
    """A process for one configuration on one GPU."""
    options = configurations()[name]
    environment = os.environ | {
        "PYTHONPATH": path,
        "CUDA_VISIBLE_DEVICES": str(gpu),
        "OMP_NUM_THREADS": "1",
        "GRAPHRT_VLLM": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": {"v1": "0", "v2": "1"}[options["runner"]],
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_DISABLE_COMPILE_CACHE": str(int("backend" in options["compilation"])),
        "VLLM_CACHE_ROOT": str(work / "cache" / name),
        **options.get("env", {}),
    }
    command = [sys.executable, "-m", "benchmarks.gpu.vllm_host", "one", name, "--work", str(work)]
    with open(log, "wb") as out:
        return subprocess.Popen(
            [*command, *more], cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT
        )


def run_memory(args: argparse.Namespace) -> int:
    """One process at a time on a GPU."""
    work, names, path = prepared(args)
    waiting = {
        gpu: [(name, each) for name in names[gpu :: args.gpus] for each in ("vllm", "graphrt")]
        for gpu in range(args.gpus)
    }
    running: dict[int, subprocess.Popen[bytes]] = {}
    while running or any(waiting.values()):
        for gpu, left in waiting.items():
            if gpu in running and running[gpu].poll() is None:
                continue
            running.pop(gpu, None)
            if left:
                name, each = left.pop(0)
                log = work / f"{name}.{each}.log"
                running[gpu] = started(name, work, path, gpu, log, "--alone", each)
        time.sleep(0.2)
    results: dict[str, dict[str, Any]] = {}
    rows = ["configuration", "first capture s g|v", "device MiB g|v", "reserved MiB g|v"]
    print("| " + " | ".join(rows) + " |\n|" + "---|" * len(rows))
    for name in names:
        found = results[name] = {}
        for each in ("graphrt", "vllm"):
            file = work / f"{name}.{each}.result.json"
            if file.exists():
                found[each] = json.loads(file.read_text())
            else:
                print((work / f"{name}.{each}.log").read_text(errors="replace")[-4000:])
        if len(found) == 2:
            cells = [
                "|".join(str(found[each][key]) for each in ("graphrt", "vllm"))
                for key in ("seconds", "mib", "reserved_mib")
            ]
            print(f"| {name} | {' | '.join(cells)} |")
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))
    return 0 if all(len(found) == 2 for found in results.values()) else 1


def run_all(args: argparse.Namespace) -> int:
    work, names, path = prepared(args)
    began = time.time()
    (work / "plan.json").write_text(json.dumps({"names": names, "began": began}))
    running: dict[str, subprocess.Popen[bytes]] = {}
    for index, name in enumerate(names):
        barrier = "--barrier", str(args.barrier)
        log = work / f"{name}.log"
        running[name] = started(name, work, path, index % args.gpus, log, *barrier)
    while running and time.time() - began < args.seconds:
        for name, process in list(running.items()):
            if process.poll() is not None:
                del running[name]
                print(f"{name}: exit {process.returncode}, {time.time() - began:.0f} s", flush=True)
        time.sleep(0.3)
    for name, process in running.items():
        process.kill()
        process.wait()
        print(f"{name}: stopped after {args.seconds} s", flush=True)
    results = {}
    for name in names:
        file = work / f"{name}.result.json"
        results[name] = json.loads(file.read_text()) if file.exists() else {"stage": "no result"}
    print(table(results))
    for name in names:
        tell(name, results[name], (work / f"{name}.log").read_text(errors="replace").splitlines())
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1))
    return 0 if all(passed(result, name) for name, result in results.items()) else 1


def passed(result: dict[str, Any], name: str) -> bool:
    if "error" in result or result.get("stage") != "done":
        return False
    if not all(batch["equal"] for batch in result["batches"].values()):
        return False
    if not result["equal_after"]:
        return False
    captured = result["graphrt"]["own_captures"]
    replayed = all(batch["graphrt_steps"] for batch in result["batches"].values())
    return not captured if configurations()[name].get("off") else bool(captured and replayed)


def table(results: dict[str, Any]) -> str:
    head = [
        "configuration",
        "mode",
        "ok",
        "equal at",
        "captures g|v",
        "capture s g|v",
        "reserved MiB g|v",
    ]
    head += [f"step us B={batch} g|v (ratio)" for batch in TIMED] + ["replays|steps B=64", "eager"]
    rows = [head, ["---"] * len(head)]
    for name, result in results.items():
        mine, theirs = result.get("graphrt", {}), result.get("vllm", {})
        batches = result.get("batches", {})
        equal = ",".join(
            str(batch) if got["equal"] else f"{batch}:{got['share_equal']}"
            for batch, got in batches.items()
        )
        row = [name, mine.get("resolved", "-").split(".")[-1], str(passed(result, name)), equal]
        row.append(f"{mine.get('graphs')}|{theirs.get('graphs')} (own {mine.get('own_captures')})")
        again = result.get("recaptured", {})
        best = [min((c["seconds"] for c in again[each]), default=None) for each in again]
        row.append("|".join(map(str, best)) or "-")
        row.append(f"{mine.get('reserved_mib')}|{theirs.get('reserved_mib')}")
        for batch in TIMED:
            got = result.get("timed", {}).get(str(batch))
            row.append(f"{got['graphrt']}|{got['vllm']} ({got['ratio']})" if got else "-")
        last = batches.get("64", {})
        row.append(f"{last.get('replays')}|{last.get('graphrt_steps')}")
        row.append(str(sum(result.get("eager", {}).values())))
        rows.append(row)
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def tell(name: str, result: dict[str, Any], log: list[str]) -> None:
    """What the log says of graphrt, and, of what failed, its end."""
    print(f"\n== {name}: {result.get('stage')}")
    for key in ("graphrt", "vllm", "eager", "equal_after"):
        print(f"   {key}: {result.get(key)}")
    for engine, captures in result.get("recaptured", {}).items():
        told = ", ".join(
            f"{c['graphs']} in {c['seconds']} s, {c['mib']} MiB, {c['reserved_mib']} reserved"
            for c in captures
        )
        print(f"   {engine} captured again: {told}")
    for line in [line for line in log if "graphrt" in line and "Traceback" not in line][:14]:
        print(f"   | {line[:260]}")
    if not passed(result, name):
        for line in (result.get("error", "").splitlines() or log)[-60:]:
            print(f"   ! {line[:400]}")
        for line in [line for line in log if "rror" in line][-12:]:
            print(f"   ? {line[:400]}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu.vllm_host", description=__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("one")
    one.add_argument("name")
    one.add_argument("--alone", choices=["graphrt", "vllm"], help="start that engine alone")
    everything = commands.add_parser("run")
    memory = commands.add_parser("memory")
    for command in (everything, memory):
        command.add_argument("--site", type=Path, help="a folder with vLLM")
        command.add_argument("--out", type=Path, help="a JSON file for all results")
        command.add_argument("--only", default="", help="regular expression on names")
        command.add_argument("--gpus", type=int, default=2)
    everything.add_argument("--seconds", type=float, default=270, help="stop what runs then")
    for command in (one, everything, memory):
        command.add_argument("--work", type=Path, required=True)
    for command in (one, everything):
        command.add_argument(
            "--barrier", type=float, default=190, help="time from then at the latest"
        )
    args = parser.parse_args()
    if args.command == "run":
        return run_all(args)
    if args.command == "memory":
        return run_memory(args)
    logging.basicConfig(level=logging.WARNING)
    args.work = args.work.resolve()
    if args.alone:
        result = run_alone(args.name, args.work, args.alone)
        (args.work / f"{args.name}.{args.alone}.result.json").write_text(json.dumps(result))
        return 0
    result = run_one(args.name, args.work, args.barrier)
    (args.work / f"{args.name}.result.json").write_text(json.dumps(result))
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main())
