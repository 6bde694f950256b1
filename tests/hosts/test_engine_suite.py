"""The runs of an engine's own tests: what they call a pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import starts

RUN = """
import sys
from tests.hosts.engine_suite import run_suite
sys.argv = ["suite", *sys.argv[1:]]
raise SystemExit(run_suite(None, "tests/ut", ("test_one.py", "test_two.py"), lambda own: None))
"""


@pytest.mark.parametrize(
    ("name", "code", "arguments", "expected"),
    [
        ("test_one.py", "def test_it(): pass", [], 0),
        ("test_one.py", "def test_it(): assert 0", [], 1),
        ("test_one.py", "import a_module_that_is_not_there", [], 1),
        ("test_one.py", "import pytest; pytest.skip('no', allow_module_level=True)", [], 1),
        ("test_one.py", "nothing = 1", [], 1),
        ("test_one.py", "def test_it(): pass", ["-k", "other"], 1),
        ("test_three.py", "def test_it(): pass", [], 1),
    ],
)
def test_an_engines_suite_passes_only_if_a_test_ran_and_all_passed(
    name: str, code: str, arguments: list[str], expected: int, tmp_path: Path
) -> None:
    folder = tmp_path / "tests" / "ut"
    folder.mkdir(parents=True)
    (folder / name).write_text(code)
    done = starts.run("-c", RUN, str(tmp_path), *arguments)
    assert done.returncode == expected, done.stdout + done.stderr


def test_a_module_that_cannot_be_imported_and_a_deselected_test_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "ut"
    folder.mkdir(parents=True)
    (folder / "test_one.py").write_text("import a_module_that_is_not_there")
    (folder / "test_two.py").write_text("def test_it(): pass\ndef test_other(): pass")
    arguments = "--continue-on-collection-errors", "--deselect=tests/ut/test_two.py::test_other"
    done = starts.run("-c", RUN, str(tmp_path), *arguments)
    assert done.stdout.splitlines()[-1] == "1 not collected, 1 not run, 1 passed", done.stdout
    assert "a_module_that_is_not_there" in done.stdout
