"""Builds the C files of native/, and runs scripts with them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests import starts

ROOT = Path(__file__).resolve().parents[2]
MODULE = "graphrt.core.base._native"

# Loads the build that is the script's last argument, before graphrt looks for one.
LOAD = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location({MODULE!r}, sys.argv[-1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sys.modules[{MODULE!r}] = module
"""


def run(script: str, *arguments: object) -> str:
    """What a script printed that succeeded."""
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = starts.run("-c", script, *map(str, arguments), cwd=ROOT, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder: Path, asked: dict[str, str]) -> list[Path]:
    """What an installation with these settings builds in an empty folder."""
    return built_by(folder, asked)[0]


def built_by(folder: Path, asked: dict[str, str]) -> tuple[list[Path], str]:
    """The same, and what it said."""
    folder.mkdir(exist_ok=True)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("native", "graphrt"):
        left_out = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, folder / name, ignore=left_out)
    others = {name: value for name, value in os.environ.items() if name != "GRAPHRT_NATIVE"}
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "built"],
        cwd=folder,
        env=others | asked,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list((folder / "built").rglob("_native.*.so")), done.stdout + done.stderr
