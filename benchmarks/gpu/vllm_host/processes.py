"""The processes of configurations, seen by their parent: files, environment, start."""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import tomllib

from benchmarks.gpu.vllm_host.configurations import configurations
from benchmarks.gpu.vllm_host.model import write_model

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


def _runs(command: str, options: dict[str, Any]) -> bool:
    """Whether a command has a configuration."""
    own = {"tried": "defect" in options, "serving": "serving" in options}
    return own[command] if command in own else not any(own.values())


def prepared(args: argparse.Namespace) -> tuple[Path, list[str], str]:
    """The working directory with a model and adapters, the configurations, and PYTHONPATH."""
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    for old in (*work.glob("*.compared"), *work.glob("*.json")):
        old.unlink()
    if args.command == "serving":
        write_model(work / "llama", layers=16, hidden=2048, heads=32, intermediate=8192)
    else:
        write_model(work / "llama")
    entry_points(work / "installed")
    names = [
        name
        for name, options in configurations().items()
        if re.search(args.only, name) and _runs(args.command, options)
    ]
    paths = [str(ROOT), str(work / "installed"), *([str(args.site)] if args.site else [])]
    path = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    if any(configurations()[name].get("lora") for name in names):
        # A process of its own: torch and safetensors may be in SITE alone.
        code = (
            "import sys, pathlib; from benchmarks.gpu.vllm_host.model import write_adapter; "
            "work = pathlib.Path(sys.argv[1]); write_adapter(work / 'adapter'); "
            "write_adapter(work / 'adapter2', rank=4, seed=8)"
        )
        subprocess.run(
            [sys.executable, "-c", code, str(work)],
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


def wait_for(running: dict[str, subprocess.Popen[bytes]], began: float, seconds: float) -> None:
    """Until all have ended, or are stopped `seconds` after `began`; prints when each ended."""
    while running and time.time() - began < seconds:
        for name, process in list(running.items()):
            if process.poll() is not None:
                del running[name]
                print(f"{name}: exit {process.returncode}, {time.time() - began:.0f} s", flush=True)
        time.sleep(0.3)
    for name, process in running.items():
        process.kill()
        process.wait()
        print(f"{name}: stopped after {seconds} s", flush=True)
