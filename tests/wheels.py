"""graphrt's wheel, built and installed as it is for a user, without a network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OFFLINE = ["--no-index", "--no-deps", "--quiet", "--disable-pip-version-check"]


def build(folder: Path) -> Path:
    """The wheel, made in `folder` of a copy, because a build writes beside its sources."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    left_out = shutil.ignore_patterns("__pycache__", "*.so")
    # What a wheel must leave out lies there too, as in a checkout.
    for name in ("graphrt", "native", "tests", "packages", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=left_out)
    _pip("wheel", *OFFLINE, "--no-build-isolation", "-w", str(folder / "built"), str(source))
    (built,) = (folder / "built").iterdir()
    return built


def install(wheel: Path, target: Path) -> None:
    """Unpack the wheel, with its metadata, into the folder `target`."""
    _pip("install", *OFFLINE, "--target", str(target), str(wheel))


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
