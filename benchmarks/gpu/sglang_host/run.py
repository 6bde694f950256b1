"""All engines at once on one GPU, each in a process group of its own; and what came of them."""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import tomllib

from benchmarks.gpu.sglang_host.configurations import AGAINST, CONFIGURATIONS, VARIABLES
from benchmarks.gpu.sglang_host.model import write_model
from benchmarks.gpu.sglang_host.turns import VARIABLE

ROOT = Path(__file__).resolve().parents[3]
OFFLINE = Path(__file__).parent / "offline"


def run_all(args: argparse.Namespace) -> int:
    """Start them, stop what runs after `args.seconds`, and print what they have done."""
    began = time.perf_counter()
    work: Path = args.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    if args.kernels:
        shutil.copytree(args.kernels, work / "kernels")
    names = [name for name in CONFIGURATIONS if re.search(args.only, name)]
    _entry_points(work / "installed")
    paths = [OFFLINE, work / "installed", ROOT, args.site.resolve()]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
        "TVM_FFI_CACHE_DIR": str(work / "kernels"),
        "TRITON_CACHE_DIR": str(work / "triton"),
    }
    if args.in_turns:
        (work / "turns").mkdir()
        captures = sum(name != "eager" for name in names)
        environment[VARIABLE] = f"{work / 'turns'}:{captures}"
    running = {"kernels": _start("kernels", work, environment)}
    write_model(work / "llama")
    running |= {name: _start(name, work, environment) for name in names}
    print(f"started after {time.perf_counter() - began:.1f} s", flush=True)
    codes: dict[str, int | str] = {}
    while len(codes) < len(running):
        for name, process in running.items():
            code = process.poll()
            if name not in codes and code is not None:
                codes[name] = code
                print(f"{name}: exit {code}, {time.perf_counter() - began:.0f} s", flush=True)
                _end_group(process)
        if time.perf_counter() - began > args.seconds:
            for name, process in running.items():
                if name not in codes:
                    codes[name] = "stopped"
                    _end_group(process, say_where=True)
        time.sleep(0.5)
    results = {name: _result(work, name) for name in names}
    for name in running:
        _print_log(work / f"{name}.log", codes[name])
    _print_names(work)
    _print_comparison(results)
    _print_turns(results)
    if args.out:
        _keep(args.out, work, results, codes)
    return 0 if all(code == 0 for code in codes.values()) else 1


def _entry_points(folder: Path) -> None:
    """Stand in for an installed graphrt, and for a plugin with the recorder."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    group = "sglang.srt.plugins"
    entries = dict(project["entry-points"][group])
    entries["zz_recorder"] = "benchmarks.gpu.sglang_host.recorder:install"
    info = folder / "graphrt-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: graphrt\nVersion: 0.1.0\n")
    lines = [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))


def _start(name: str, work: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    package = "benchmarks.gpu.sglang_host"
    command = [sys.executable, "-m", package, "one", name, "--work", str(work)]
    with open(work / f"{name}.log", "wb") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment
            | {"GRAPHRT_STAND_INS": str(work / f"{name}.names")}
            | {"GRAPHRT_BENCH_STEPS": str(work / f"{name}.bench")}
            | VARIABLES.get(name, {}),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _end_group(process: subprocess.Popen[bytes], *, say_where: bool = False) -> None:
    """End a process and its children; they write first where they are, if asked."""
    try:
        if say_where:
            os.killpg(process.pid, signal.SIGUSR1)
            time.sleep(1.5)
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _result(work: Path, name: str) -> dict[str, Any]:
    path = work / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {"error": "no result"}


def _print_log(path: Path, code: int | str) -> None:
    """Its last traceback, if it failed, and its last lines."""
    text = path.read_text(errors="replace")
    print(f"---- {path.stem}: {code}")
    if code == 0:
        pattern = r"kernel |: imported|graphrt|FULL|PIECEWISE|Trials|Steps|quarantine|max_total_num"
        print("\n".join(line[:200] for line in text.splitlines() if re.search(pattern, line)))
        return
    blocks = re.split(r"(?=^.*Traceback \(most recent call last\))", text, flags=re.M)[1:]
    told: set[str] = set()
    for block in blocks:
        lines = block.splitlines()
        # The frames, up to the line that names the error.
        end = next(
            (index for index, line in enumerate(lines[1:], 1) if re.match(r"\S*(Error|Exc)", line)),
            len(lines) - 1,
        )
        cut = [line[:220] for line in lines[: end + 4]]
        if cut[-1] not in told and len(told) < 4:
            told.add(cut[-1])
            print("\n".join([*cut[:2], "  ...", *cut[-24:]] if len(cut) > 28 else cut))
    print("  last lines:")
    frame = re.compile(r'File "<frozen')
    last = [line[:220] for line in text.splitlines() if not frame.search(line)]
    print("\n".join(last[-12 if told else -40 :]))


def _print_names(work: Path) -> None:
    names = {line for path in work.glob("*.names") for line in path.read_text().splitlines()}
    print(f"---- {len(names)} names of packages that are not here were looked up:")
    print(" ".join(sorted(names)))


def _print_comparison(results: dict[str, dict[str, Any]]) -> None:
    print("---- tokens and largest difference of log probabilities, against another engine")
    for name, result in results.items():
        batches = result.get("batches", {})
        against = AGAINST.get(name)
        expected = results.get(against or "", {}).get("batches", {})
        for turn, got in batches.items():
            if against:
                _print_pair(f"{name} {turn} against {against}", got, expected.get(turn))
        for first, second in (("recorded", "again"), ("first", "second")):
            for turn in [each for each in batches if each.endswith(first)]:
                later = turn.replace(first, second)
                _print_pair(
                    f"{name} {later} against its {first}", batches.get(later), batches[turn]
                )
        _print_steps(name, result, against, results.get(against or "", {}))


def _print_pair(name: str, got: dict[str, Any] | None, want: dict[str, Any] | None) -> None:
    if not got or not want or "error" in want or "error" in got:
        print(f"{name}: {(got or {}).get('error', 'nothing to compare')}")
        return
    pairs = list(zip(got["tokens"], want["tokens"], strict=True))
    # One that was aborted in either has fewer tokens: those it has are compared.
    cut = [(mine[: len(theirs)], theirs[: len(mine)]) for mine, theirs in pairs]
    same = sum(mine == theirs for mine, theirs in cut)
    differences = [
        abs(mine - theirs)
        for many, others in zip(got["logprobs"], want["logprobs"], strict=True)
        for mine, theirs in zip(many, others, strict=False)
    ]
    aborted = (
        sum(end == "abort" for end in got["ends"]),
        sum(end == "abort" for end in want["ends"]),
    )
    print(
        f"{name}: {same}/{len(pairs)} equal, {max(differences, default=0.0):.3g}, "
        f"aborted {aborted}, {got['seconds']} s ({want['seconds']})"
    )


def _print_steps(
    name: str, result: dict[str, Any], against: str | None, other: dict[str, Any]
) -> None:
    """Recorded steps: how many are the same batch, and how many of these have equal logits."""
    mine, theirs = result.get("steps", []), other.get("steps", [])
    if mine and theirs:
        pairs = list(zip(mine, theirs, strict=False))
        same = [(a, b) for a, b in pairs if a[:3] == b[:3]]
        equal = sum(a[4] == b[4] for a, b in same)
        by_graph = sum(bool(a[3]) for a in mine)
        print(
            f"{name} steps: {len(mine)} (by graph {by_graph}), {against} {len(theirs)}; same batch "
            f"{len(same)}, of these logits equal {equal}"
        )
    told = result.get("told", {})
    if told:
        print(
            f"{name}: captures {told['captures']}, allocated {told['allocated_mib']} MiB, reserved "
            f"{told['reserved_mib']} MiB, failures {told.get('failures')}"
        )


def _print_turns(results: dict[str, dict[str, Any]]) -> None:
    """The timed turns of each engine beside those of the one it is compared with."""
    for name, result in results.items():
        mine, theirs = _turns(result), _turns(results.get(AGAINST.get(name, ""), {}))
        for batch in mine:
            if batch in theirs:
                ratio = mine[batch] / theirs[batch]
                print(
                    f"{name} in turns, batch {batch}: {mine[batch] * 1e3:.2f} ms of "
                    f"{theirs[batch] * 1e3:.2f} ms, {ratio:.3f}"
                )


def _turns(result: dict[str, Any]) -> dict[str, float]:
    """Batch -> the median of its timed turns, seconds."""
    seconds: dict[str, list[float]] = {}
    for label, turn in result.get("batches", {}).items():
        batch, _, kind = label.partition(" ")
        if kind.startswith("turn") and "seconds" in turn:
            seconds.setdefault(batch, []).append(turn["seconds"])
    return {batch: statistics.median(each) for batch, each in seconds.items()}


def _keep(
    out: Path, work: Path, results: dict[str, dict[str, Any]], codes: dict[str, int | str]
) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"codes": codes, "results": results}))
    with tarfile.open(out.with_suffix(".tar.gz"), "w:gz") as archive:
        for path in (*work.glob("*.log"), *work.glob("*.names")):
            archive.add(path, path.name)
        for path in (work / "kernels").rglob("*.so"):
            archive.add(path, path.relative_to(work))
