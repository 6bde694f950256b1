"""What is released belongs together: tag, version, changelog and the files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_setup import load

ROOT = Path(__file__).resolve().parent.parent
check = load(ROOT / "ci" / "release_check.py")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository at version 1.2.0, for Python 3.10 and 3.11."""
    (tmp_path / "graphrt").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "graphrt" / "_version.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "docs" / "changelog.md").write_text(
        "# Changelog\n\n## Not released\n\n- Later.\n\n"
        "## 1.2.0 (today)\n\n- Graphs.\n\n## 1.1.0\n\n- No.\n"
    )
    (tmp_path / "pyproject.toml").write_text(
        '"Programming Language :: Python :: 3",\n"Programming Language :: Python :: 3.10",\n'
        '"Programming Language :: Python :: 3.11",\n'
    )
    return tmp_path


def files(dist: Path) -> list[Path]:
    dist.mkdir()
    names = ["graphrt-1.2.0.tar.gz", "graphrt-1.2.0-py3-none-any.whl"]
    for python in ("cp310", "cp311"):
        for machine in ("x86_64", "aarch64"):
            tags = f"manylinux2014_{machine}.manylinux_2_17_{machine}"
            names.append(f"graphrt-1.2.0-{python}-{python}-{tags}.whl")
    paths = [dist / name for name in names]
    for path in paths:
        path.touch()
    return paths


def test_a_complete_release_has_no_problems(root: Path) -> None:
    files(root / "dist")
    assert check.problems("v1.2.0", root / "dist", root) == []
    assert check.notes(root) == "- Graphs."


@pytest.mark.parametrize("left_out", range(6))
def test_the_release_check_names_each_missing_file(root: Path, left_out: int) -> None:
    path = files(root / "dist")[left_out]
    path.unlink()
    (problem,) = check.problems("v1.2.0", root / "dist", root)
    assert path.name.split("manylinux")[0].split("-")[1] in problem.replace("\\", "")


def test_the_release_check_names_a_tag_of_another_version(root: Path) -> None:
    (problem,) = check.problems("v1.3.0", None, root)
    assert "v1.3.0 is not v1.2.0" in problem


def test_the_release_check_names_a_version_missing_in_the_changelog(root: Path) -> None:
    (root / "docs" / "changelog.md").write_text("# Changelog\n\n## 1.2.0\n\n## 1.1.0\n\n- No.\n")
    (problem,) = check.problems("v1.2.0", None, root)
    assert '"## 1.2.0"' in problem


def test_wheels_are_built_for_exactly_the_declared_pythons() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    line = next(line for line in text.splitlines() if line.startswith("build = ["))
    assert [each.split("-")[0] for each in line.split('"')[1::2]] == check.pythons()


def test_every_make_target_of_the_workflows_exists() -> None:
    workflows = ROOT / ".github" / "workflows"
    text = "".join(path.read_text(encoding="utf-8") for path in workflows.glob("*.yml"))
    paths = set(re.findall(r"(?<![\w./-])(?:\.ci|ci|tests)/[\w./]+", text))
    assert {"ci/wheels.sh", "tests/core"} <= paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
    (listed,) = re.findall(r"target: \[(.*)\]", text)
    targets = {*re.findall(r"\bmake ([\w-]+)", text), *listed.split(", ")}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    rules = re.findall(r"^([\w -]+):", makefile, re.MULTILINE)
    assert targets <= {name for rule in rules for name in rule.split()}
