"""docs/architecture.md: its map and walks are what is there; the site has all of the surface."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from tests.test_layout import LAYERS, UPPER
from tests.test_surface import PUBLIC, SURFACE

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)
WALKED = [
    (file, name)
    for block in BLOCKS[1:]
    for file, name in re.findall(r"^(\S+\.py) +([\w.]+)", block, re.MULTILINE)
]


def folders(tree: str) -> list[str]:
    """The folders of a map that is indented by two spaces, as paths."""
    found, around = [], []
    for line in tree.splitlines():
        name = re.match(r"( *)(\w+)/ +\S", line)
        assert name, line
        del around[len(name[1]) // 2 :]
        around.append(name[2])
        found.append("/".join(around))
    return found


def test_the_map_has_every_folder_once():
    real = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "graphrt").rglob("*.py")}
    mapped = folders(BLOCKS[0])
    assert len(mapped) == len(set(mapped))
    assert set(mapped) == real


def test_the_map_has_the_layers_in_their_order():
    inner = [path.removeprefix("graphrt/core/") for path in folders(BLOCKS[0])]
    assert [name for name in inner if name in LAYERS] == list(LAYERS)
    assert ", ".join(f"`{name}`" for name in UPPER) in PAGE


@pytest.mark.parametrize(("file", "name"), WALKED, ids=lambda value: str(value))
def test_what_the_walks_call_is_there(file, name):
    body = ast.parse((ROOT / "graphrt" / file).read_text(encoding="utf-8")).body
    for part in name.split("."):
        nodes = [
            n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == part
        ]
        assert nodes, f"{file} has no {name}"
        body = nodes[0].body


def test_methods_that_the_page_names_are_there():
    classes: dict[str, set[str]] = {}
    for path in (ROOT / "graphrt").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, set()).update(members(node))
    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)", PAGE))
    of_vllm = {"GPUModelRunner", "CUDAGraphWrapper"}
    missing = [each for each in named if each[1] not in classes.get(each[0], ())]
    assert len(named) > 30
    assert [each for each in missing if each[0] not in of_vllm] == []


def members(body: ast.ClassDef) -> set[str]:
    """Methods, fields, and attributes of `self`."""
    found = set()
    for node in ast.walk(body):
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def test_there_are_walks():
    assert len(WALKED) > 25


@pytest.fixture(scope="module")
def site():
    """docs/site_pages.py, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_a_page_for_every_public_module(site):
    assert site.PUBLIC == PUBLIC


def test_the_reference_describes_every_public_name_once(site):
    homes = site.homes()
    assert {(module, name) for module in homes for name in homes[module]} == set(SURFACE)
    for module, names in homes.items():
        page = site.reference(module, names)
        for name, home in names.items():
            described = f"::: {module}.{name}" in page.splitlines()
            assert described == (home == module and f"{module}.{name}" not in PUBLIC)


def test_the_site_has_every_document(site):
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = set(re.findall(r": ([\w.]+\.md)$", settings, re.MULTILINE))
    assert pages == {"index.md"} | {path.name for path in (ROOT / "docs").glob("*.md")}
