"""`benchmarks.house` over a small tree of which all counts are known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.house import code_lines, house

ENGINE = '''"""A docstring of a module
in two lines."""

# A comment.
from __future__ import annotations

import os  # with a comment behind it

LIMIT = 3
"""Of a constant."""


class Engine:
    """Of a class."""

    width: int
    """Of a field."""
    depth = 2

    def __init__(self, given):
        """Of a method."""
        self.given = given
        self.count, self.others = 0, []
        self.table: dict = {}
        given.not_its_own = 1

    def step(self, batch):
        text = """Not a docstring:

        three lines with a blank one, all of them a value."""
        for row in batch:
            if row and not batch or text:
                self.count += 1
                self.given = [each for each in row if each]
            elif row is None:
                assert batch
        try:
            return 1 if batch else 2
        except ValueError:
            pass

        def inner(x):
            while x:
                x -= 1
            return lambda: x

        class Local:
            def of_local(self):
                return inner

        return Local


async def match(value):
    match value:
        case 1:
            return os
        case _:
            async for each in value:
                return each
'''
STEP_C = """// A comment.
/* One
   of three
   lines. */
#include <x.h>

int step(void) {  // behind code
    return 1; /* behind code too */
}
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "graphrt/__init__.py": '"""Nothing."""\n',
        "graphrt/version.py": "ONE = 1\n\nTWO = (\n    2,\n\n    # between\n    3,\n)\n",
        "graphrt/core/top.py": "def nothing(): ...\n",
        "graphrt/core/runner/engine.py": ENGINE,
        "graphrt/core/runner/empty.py": "",
        "graphrt/cli/app.py": "class App:\n    def run(self):\n        self.one = 1\n",
        "native/step.c": STEP_C,
        "native/step.h": "int step(void);\n",
        "tests/not_counted.py": "x = 1\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_house_counts_code_lines_and_files_per_mechanism(tree: Path):
    facts = house(tree)
    assert facts["lines"] == {
        "surface": 5,
        "core": 1,
        "core/runner": 40,
        "cli": 3,
        "native": 5,
    }
    assert facts["files"] == {"surface": 2, "core": 1, "core/runner": 2, "cli": 1, "native": 2}


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", 0),
        ("\n\n# comment\n", 0),
        ('"""Module."""\n', 0),
        ('x = """a\n\nb"""\n', 3),
        ('def f():\n    """Of f."""\n', 1),
        ("x = 1  # comment\n", 1),
        ("x = [\n    1,  # comment\n    # comment\n]\n", 3),
        ('async def f():\n    """Of f,\n    on two lines."""\n    return f"{1}"\n', 2),
    ],
)
def test_code_lines_exclude_blanks_comments_and_docstrings(tmp_path: Path, text: str, lines: int):
    path = tmp_path / "one.py"
    path.write_text(text)
    assert code_lines(path) == lines


def test_house_counts_branches_and_lines_per_function(tree: Path):
    where = "graphrt/core/runner/engine.py"
    functions = {one.where.partition(" ")[2]: one for one in house(tree)["functions"]}
    assert {name: (one.complexity, one.lines) for name, one in functions.items()} == {
        # for, if, and, or, comprehension, elif, assert, except, conditional expression
        "step": (10, 25),
        "inner": (2, 4),
        "match": (4, 7),
        "of_local": (1, 2),
        "__init__": (1, 6),
        "run": (1, 2),
        "nothing": (1, 1),
    }
    assert functions["step"].where.startswith(f"{where}:")
    most = [one.complexity for one in house(tree)["functions"]]
    assert most == sorted(most, reverse=True)


def test_house_counts_fields_declared_or_set_by_methods(tree: Path):
    classes = {one.where.partition(" ")[2]: one for one in house(tree)["classes"]}
    assert {name: (one.fields, one.methods) for name, one in classes.items()} == {
        "Engine": (5, 2),  # width, given, count, others, table
        "Local": (0, 1),
    }


def test_the_house_command_prints_totals_and_writes_a_file(tree: Path, tmp_path: Path):
    written = tmp_path / "facts.json"
    options = ["--root", str(tree), "--functions", "--classes", "--json", str(written)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.house", *options],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "core in all 41" in lines and "all 54 8 files" in lines
    assert "functions above complexity 15 or 60 lines: 0" in lines
    assert "classes of core: 2, above 12 fields: 0" in lines
    assert any(line.startswith("5 2 graphrt/core/runner/engine.py:") for line in lines)
    assert json.loads(written.read_text())["lines"]["native"] == 5
