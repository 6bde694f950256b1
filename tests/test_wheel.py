"""graphrt's wheel: its modules, the compiled one, py.typed, metadata, and nothing else."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

import pytest

from tests.wheels import install

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "graphrt"
MOST_KIB = 1100
"""Of these three engines' adapters take 120."""


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[PurePosixPath]:
    with ZipFile(wheel) as archive:
        return [PurePosixPath(name) for name in archive.namelist()]


def test_the_wheel_is_below_its_size_limit(wheel: Path) -> None:
    assert wheel.stat().st_size <= MOST_KIB * 1024


def test_the_compiled_module_has_no_debug_symbols(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        compiled = [name for name in archive.namelist() if "/_native." in name]
        assert [name for name in compiled if b".debug_info" in archive.read(name)] == []


def test_the_wheel_holds_exactly_the_modules_of_graphrt(names: list[PurePosixPath]) -> None:
    held = {str(name) for name in names if not name.parts[0].endswith(".dist-info")}
    modules = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py")}
    # Where there is a compiler, and Python's headers.
    compiled = {name for name in held if name.startswith("graphrt/core/base/_native.")}
    assert len(compiled) <= 1
    assert held - compiled == modules | {"graphrt/py.typed"}


def test_every_folder_in_the_wheel_is_a_package(names: list[PurePosixPath]) -> None:
    folders = {name.parent for name in names if name.parts[0] == "graphrt"}
    assert [str(each) for each in folders if each / "__init__.py" not in names] == []


def test_the_wheel_metadata_has_licence_and_command(names: list[PurePosixPath]) -> None:
    metadata = {str(PurePosixPath(*name.parts[1:])) for name in names if name.parts[0] != "graphrt"}
    assert {"METADATA", "RECORD", "entry_points.txt", "licenses/LICENSE"} <= metadata


def test_links_in_the_wheels_readme_lead_to_the_source(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = email.message_from_bytes(archive.read(path))
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL", []))
    shown = re.findall(r"\]\(([^)]+)\)", str(metadata.get_payload()))
    kept = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert "docs/troubleshooting.md" in kept
    assert shown == [
        link if link.startswith("https:") else f"{urls['Source']}/blob/main/{link}" for link in kept
    ]
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_the_installed_wheel_runs_the_readme_example(wheel: Path, tmp_path: Path) -> None:
    install(wheel, tmp_path / "site")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = readme.split("```python\n")[1].partition("```")[0]
    script = tmp_path / "example.py"
    script.write_text(f"{example}\nimport graphrt\nprint(graphrt.__file__)\n")
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *printed, place = done.stdout.splitlines()
    assert printed == ["torch.Size([3, 10]) HIT"]
    assert Path(place) == tmp_path / "site" / "graphrt" / "__init__.py"
