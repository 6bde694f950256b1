"""What is released belongs together: tag, version, changelog and the files. And nobody else gets
code into a release: rules on the workflows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

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


def test_the_release_check_names_a_file_that_is_none_of_the_release(root: Path) -> None:
    files(root / "dist")
    (root / "dist" / "graphrt-1.2.0-cp311-cp311-win_amd64.whl").touch()
    (problem,) = check.problems("v1.2.0", root / "dist", root)
    assert "win_amd64.whl', which is no file of this release" in problem


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


# Rules on the workflows --------------------------------------------------------------------------

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
READ = {"contents": "read"}
PINNED = re.compile(r"[ -]*uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
INSTALLS = re.compile(r"\b(pip3?|uv|pipx|npm|npx|apt-get|curl|wget|docker|go|cargo|make)\b")


def parsed(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def rights(workflow: dict[str, Any], job: dict[str, Any]) -> dict[str, str]:
    return job.get("permissions", workflow.get("permissions"))  # type: ignore[no-any-return]


def steps(workflow: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            yield job, step


def broken_rules(path: Path) -> list[str]:
    """What is wrong with a workflow's file."""
    workflow, text, found = parsed(path), path.read_text(encoding="utf-8"), []
    if workflow.get("permissions") != READ:
        found.append("the workflow has more rights than to read")
    if re.search("pull_request_target|workflow_run", text):
        found.append("code of a fork would run with this repository's secrets")
    if re.search("extra.?index", text, re.IGNORECASE):
        found.append("an extra index may supply any package")
    if "env" in workflow:
        found.append("a variable for every job")
    for job, step in steps(workflow):
        action, script = step.get("uses", ""), step.get("run", "")
        lines = [line for line in text.splitlines() if action and f"uses: {action}" in line]
        if not all(PINNED.fullmatch(line) for line in lines):
            found.append(f"{action} is not pinned to a commit, with its version behind it")
        if action.startswith("actions/checkout@") and (
            step.get("with", {}).get("persist-credentials") is not False
        ):
            found.append("a checkout leaves its token for the steps after it")
        if "${{ github.event" in script or "${{ github.head_ref" in script:
            found.append("a name from outside is part of a script")
        if rights(workflow, job) != READ:
            if INSTALLS.search(script):
                found.append(f"a job with rights installs or builds: {script}")
            if "environment" not in job or "self-hosted" in str(job["runs-on"]):
                found.append("a job with rights needs an environment, and GitHub's own machine")
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_keeps_the_rules_on_rights_pins_and_indexes(path: Path) -> None:
    assert broken_rules(path) == []


@pytest.mark.parametrize(
    ("was", "now", "rule"),
    [
        ("contents: read", "contents: write", "more rights"),
        ("  workflow_dispatch:", "  pull_request_target:", "code of a fork"),
        ("jobs:", "env:\n  A: b\njobs:", "every job"),
        ("  sdist:", "  # PIP_EXTRA_INDEX_URL\n  sdist:", "extra index"),
        ("34e114876b0b11c390a56381ad16ebd13914f8d5 # v4.3.1", "v4", "not pinned"),
        (" # v4.3.1", "", "not pinned"),
        ("        with:\n          persist-credentials: false\n", "", "leaves its token"),
        ("persist-credentials: false", "persist-credentials: true", "leaves its token"),
        ('ci/release_check.py "$GITHUB_REF_NAME" dist', "x; pip install x", "installs or builds"),
        ("    environment: release\n", "", "needs an environment"),
        ('$GITHUB_REF_NAME" dist', "${{ github.head_ref }}", "name from outside"),
    ],
)
def test_each_rule_on_workflows_finds_its_fault(
    was: str, now: str, rule: str, tmp_path: Path
) -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    assert was in text
    (tmp_path / "release.yml").write_text(text.replace(was, now, 1))
    assert any(rule in each for each in broken_rules(tmp_path / "release.yml"))


def test_only_the_publishing_job_has_rights_and_it_publishes_what_was_tried() -> None:
    jobs = {
        (path.stem, name): job
        for path in WORKFLOWS
        for name, job in parsed(path)["jobs"].items()
        if rights(parsed(path), job) != READ
    }
    assert jobs.keys() == {("release", "publish")}
    needed = jobs["release", "publish"]["needs"]
    assert set(needed) == parsed(ROOT / ".github/workflows/release.yml")["jobs"].keys() - {
        "publish"
    }


LOCKS = sorted((ROOT / "ci" / "locks").glob("*.txt"))


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_every_package_of_a_lock_has_one_version_and_hashes(path: Path) -> None:
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    needs = text.replace("\\\n", " ").strip().splitlines()
    pin = re.compile(r"[\w.-]+==[\w.]+( ; [^#]+?)?(\s+--hash=sha256:[0-9a-f]{64})+\s*")
    assert needs and [each for each in needs if not pin.fullmatch(each)] == []


def test_release_files_are_built_and_listed_by_locked_tools_alone() -> None:
    release = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    wheels = (ROOT / "ci" / "wheels.sh").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    used = {*re.findall(r"ci/locks/\w+\.txt", release + wheels + project)}
    assert used == {str(path.relative_to(ROOT)) for path in LOCKS}
    assert wheels.count("pip install") == wheels.count("--require-hashes") == 1
    assert wheels.count("-m build") == wheels.count("--no-isolation") == 3
    assert 'args = ["--no-isolation"]' in project and "--require-hashes" in project
    # Else: a graphrt that was built, and packages beside it, in a job without rights.
    installs = re.findall(r"pip install (.*)", release)
    assert [each for each in installs if not each.startswith(("dist/", "--require-hashes"))] == []


def test_no_package_without_a_hash_is_installed_before_the_files_of_a_release_are_uploaded() -> (
    None
):
    jobs = parsed(ROOT / ".github/workflows/release.yml")["jobs"]
    uploading = 0
    for job in jobs.values():
        names = [step.get("with", {}).get("name", "") for step in job["steps"]]
        uploads = [at for at, name in enumerate(names) if name.startswith("dist-")]
        uploads = [at for at in uploads if "upload-artifact" in job["steps"][at]["uses"]]
        for step in job["steps"][: max(uploads, default=0)]:
            script = step.get("run", "")
            assert not re.search(r"cpu_torch|pip install (?!--require-hashes)", script), script
        uploading += bool(uploads)
    assert uploading == 2
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (building,) = re.findall(
        r"^\[tool\.cibuildwheel\]\n(.*?)\n\n", project, re.DOTALL | re.MULTILINE
    )
    keys = re.findall(r"^([\w-]+) =", building, re.MULTILINE)
    # A test of one wheel runs on the machine that builds the next one.
    assert "before-build" in keys and [key for key in keys if "test" in key] == []


def test_each_wheel_of_a_release_is_tried_before_it_is_published() -> None:
    jobs = parsed(ROOT / ".github/workflows/release.yml")["jobs"]
    tried, wheels = jobs["tried"]["strategy"]["matrix"], jobs["wheels"]["strategy"]["matrix"]
    assert tried["runner"] == wheels["runner"]
    assert [f"cp{each.replace('.', '')}" for each in tried["python"]] == check.pythons()
    assert "wheel_check.py --native" in jobs["tried"]["steps"][-1]["run"]


def test_torch_alone_comes_from_its_own_index() -> None:
    shell = {path: path.read_text(encoding="utf-8") for path in (ROOT / "ci").glob("*.sh")}
    for path, text in shell.items():
        assert not re.search("extra.?index", text, re.IGNORECASE), path
        for line in text.splitlines():
            if "--index-url" in line:
                assert "--no-deps" in line and "GRAPHRT_TORCH_INDEX" in line, line


def test_a_self_hosted_runner_runs_one_job_and_checks_its_download() -> None:
    text = (ROOT / "ci" / "runners" / "start.sh").read_text(encoding="utf-8")
    (configured,) = re.findall(r"^\./config\.sh (?!remove).*$", text, re.MULTILINE)
    assert " --ephemeral " in configured
    fetched, checked, unpacked = (text.index(each) for each in ("curl ", "sha256sum", "tar x"))
    assert fetched < checked < unpacked
    rows = load(ROOT / "ci" / "matrix.py").read_rows()
    assert all(isinstance(row["runner"], str) or "self-hosted" in row["runner"] for row in rows)
