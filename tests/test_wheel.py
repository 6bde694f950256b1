"""graphrt's wheel: its Python modules, py.typed and metadata, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "graphrt"
MOST_KIB = 512


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of a copy, because a build writes beside its sources, and without a network."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # What a wheel must leave out lies there too, as in a checkout.
    for name in ("graphrt", "tests", "packages", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-index", "--no-deps", "--no-build-isolation", "-w", str(target), str(source)]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[PurePosixPath]:
    with ZipFile(wheel) as archive:
        return [PurePosixPath(name) for name in archive.namelist()]


def test_it_is_pure_python_and_small(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size <= MOST_KIB * 1024


def test_it_holds_the_modules_and_nothing_else(names: list[PurePosixPath]) -> None:
    held = {str(name) for name in names if not name.parts[0].endswith(".dist-info")}
    modules = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py")}
    assert held == modules | {"graphrt/py.typed"}


def test_every_folder_is_a_package(names: list[PurePosixPath]) -> None:
    folders = {name.parent for name in names if name.parts[0] == "graphrt"}
    assert [str(each) for each in folders if each / "__init__.py" not in names] == []


def test_its_metadata_brings_the_licence_and_the_command(names: list[PurePosixPath]) -> None:
    metadata = {str(PurePosixPath(*name.parts[1:])) for name in names if name.parts[0] != "graphrt"}
    assert {"METADATA", "RECORD", "entry_points.txt", "licenses/LICENSE"} <= metadata
