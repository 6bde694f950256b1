"""Change the simulator in one place and see whether its tests notice: `python mutants.py`.

    python mutants.py [--only TEXT]

With the environment of `make test-ascend`. `mutants.json` has of each mutant the file, what it is,
the text as it is (found once), what it becomes, and which tests are asked. Only the changed file is
compiled anew. Exits with 1 if a mutant is not noticed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from graphrt_ascend_sim import building

HERE = Path(__file__).resolve().parent
PACKAGE = Path(building.__file__).parent


def build(native: Path, file: str, base: Path) -> None:
    """The libraries of the changed sources, from the objects of the unchanged ones."""
    building.SOURCES = native
    target, torch = building._directory(), building._package("torch")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(base, target)
    include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    operator = file.startswith("operators/")
    options = ["-std=c++20", *include] if operator else ["-std=c++17"]
    building._run(target, *building._FLAGS, f"-I{native}", "-c", *options, str(native / file))

    def objects(*folders: str) -> list[str]:
        return [f"{p.stem}.o" for folder in folders for p in sorted(native.glob(f"{folder}*.cpp"))]

    if operator:
        here = ["-L.", "-lascendcl", "-Wl,-rpath,$ORIGIN", f"-L{torch / 'lib'}", "-ltorch_cpu"]
        names = [*objects("operators/"), "missing.o", *here, "-lc10"]
        building._link(target, building.OPERATOR_LIBRARY, *names)
    else:
        names = objects("", "device/", "graphs/", "runtime/")
        building._link(target, building.DEVICE_LIBRARY, *names, "-lpthread")


def noticed(source: Path, cache: Path, tests: list[str]) -> str:
    """The first test that fails, or ""."""
    paths = [str(source), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header"]
    command += [str(HERE / "tests" / test) for test in tests]
    try:
        done = subprocess.run(
            command,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "no end"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "" if done.returncode == 0 else (failed or [f"died: {done.stderr[-200:]}"])[0]


def main() -> int:
    """Run them; returns how many were not noticed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="a part of what it is")
    options = parser.parse_args()
    base, alive, count = building.build(), 0, 0
    for change in json.loads((HERE / "mutants.json").read_text(encoding="utf-8")):
        if options.only not in change["what"]:
            continue
        start, count = time.monotonic(), count + 1
        with tempfile.TemporaryDirectory() as place:
            source = Path(place) / "src"
            shutil.copytree(PACKAGE, source / PACKAGE.name)
            changed = source / PACKAGE.name / "native" / change["file"]
            text = changed.read_text(encoding="utf-8")
            if text.count(change["old"]) != 1:
                raise SystemExit(f"{change['what']}: found {text.count(change['old'])} times")
            changed.write_text(text.replace(change["old"], change["new"]), encoding="utf-8")
            os.environ["XDG_CACHE_HOME"] = place
            build(source / PACKAGE.name / "native", change["file"], base)
            by = noticed(source, Path(place), change["tests"])
        alive += not by
        said = f"noticed by {by}" if by else "SURVIVED"
        print(f"{change['file']}: {change['what']}: {said} ({time.monotonic() - start:.0f} s)")
        sys.stdout.flush()
    print(f"{count} mutants, {count - alive} noticed")
    return alive


if __name__ == "__main__":
    sys.exit(min(main(), 1))
