"""The order of graphrt.compile's folders, as its docstring has it: imports go one way."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import graphrt.compile

ROOT = Path(str(graphrt.compile.__file__)).parent
ORDER = (
    "errors",
    "options",
    "locks",
    "private_torch",
    "trace",
    "cache",
    "split",
    "backend",
    "pieces",
)
ORDER += ("module", "api")
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def imported(path: Path) -> set[tuple[str, ...]]:
    """What a file imports of graphrt.compile anywhere in it, as parts of the dotted names."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {tuple(n.split(".")[2:]) for n in names if f"{n}.".startswith("graphrt.compile.")}


def test_the_docstring_of_graphrt_compile_lists_folders_in_import_order():
    text = graphrt.compile.__doc__ or ""
    places = [text.index(f"    {name} ") for name in ORDER if (ROOT / name).is_dir()]
    assert len(places) == 6 and places == sorted(places)
    assert {path.stem for path in ROOT.iterdir() if path.name[:2] != "__"} == set(ORDER)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_folders_of_graphrt_compile_import_only_earlier_folders(path: Path):
    own = path.relative_to(ROOT).with_suffix("").parts
    for name in imported(path):
        assert name, "a module may not import the package that it is in"
        assert name[0] == own[0] or ORDER.index(name[0]) < ORDER.index(own[0])


def test_no_modules_of_a_folder_import_each_other():
    waiting = {path: {ROOT.joinpath(*n) for n in imported(path) if len(n) == 2} for path in FILES}
    while waiting:
        there = {path.with_suffix("") for path in waiting}
        free = [path for path, needs in waiting.items() if not needs & there]
        assert free, sorted(map(str, waiting))
        for path in free:
            del waiting[path]
