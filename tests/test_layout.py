"""The house plan: who may import whom, and how long a file may be (DESIGN section 2)."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "graphrt"
FILES = sorted(PACKAGE.rglob("*.py"))
PLATFORMS = ("cpu", "cuda", "ascend", "accelerator")
MOST_LINES = 400

THIRD_PARTY = {
    "core": {"torch", "pluggy"},
    "cpu": {"torch", "pluggy"},
    "cuda": {"torch", "pluggy", "cuda", "triton"},
    "ascend": {"torch", "pluggy", "torch_npu", "acl"},
    "accelerator": {"torch", "pluggy"},
}


def layer_of(path: Path) -> str:
    """ "core" for graphrt/core/replay/pool.py, "" for graphrt/__init__.py."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def imports(source: str, package: str) -> Iterator[str]:
    """The dotted names that `source`, a module of `package`, imports anywhere in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            module = importlib.util.resolve_name(relative, package) if node.level else relative
            # `from graphrt import cpu` imports graphrt.cpu as much as `import graphrt.cpu` does.
            yield from (f"{module}.{alias.name}" for alias in node.names)


def breaches(layer: str, source: str, package: str) -> list[str]:
    """What a module of `layer` imports and may not."""
    own = {"core"} if layer == "core" else {"core", layer}
    refused = []
    for name in imports(source, package):
        top, *rest = name.split(".")
        if top == "graphrt":
            allowed = bool(rest) and rest[0] in own
        else:
            allowed = top in sys.stdlib_module_names or top in THIRD_PARTY[layer]
        if not allowed:
            refused.append(name)
    return refused


def test_there_is_something_to_check() -> None:
    assert {"core", "cpu"} <= {layer_of(path) for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_keep_to_their_layer(path: Path) -> None:
    layer = layer_of(path)
    if layer not in ("core", *PLATFORMS):
        return
    package = ".".join(path.relative_to(ROOT).parent.parts)
    assert breaches(layer, path.read_text(encoding="utf-8"), package) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_too_long(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MOST_LINES, f"{lines} lines; split it by what it is for"


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("core", "import graphrt.cpu"),
        ("core", "from graphrt import cpu"),
        ("core", "from graphrt.cpu.arena import Arena"),
        ("core", "from ..cpu import arena"),
        ("core", "def late():\n    from graphrt.cuda import x"),
        ("core", "import numpy"),
        ("core", "import torch_npu"),
        ("core", "from graphrt import GraphRunner"),
        ("cpu", "from graphrt.cuda import x"),
        ("cpu", "from graphrt.demo import x"),
        ("cuda", "import torch_npu"),
        ("accelerator", "from graphrt.cuda import x"),
    ],
)
def test_the_check_finds_breaches(layer: str, source: str) -> None:
    assert breaches(layer, source, f"graphrt.{layer}")


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("core", "import os, torch, pluggy, graphrt.core.replay.pool"),
        ("core", "from . import tree"),
        ("cpu", "from graphrt.core import tree\nfrom graphrt.cpu.arena import Arena"),
        ("cuda", "from cuda.bindings import driver"),
    ],
)
def test_the_check_lets_the_rest_through(layer: str, source: str) -> None:
    assert breaches(layer, source, f"graphrt.{layer}") == []
