"""docs/development/architecture.md: layers, imports one way, a word on each folder."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "graphrt"
FILES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = sorted({path.parent for path in FILES} - {PACKAGE})

LAYERS = (
    "base", "batch", "device", "plan", "dispatch", "inputs", "replay", "capture", "runner"
)  # fmt: skip
"""Of core: each may use those before it."""

PLATFORMS = ("cpu", "cuda", "ascend", "accelerator")
LOWER = (*PLATFORMS, "trust")
"""Each imports core and none of the others."""

THIRD_PARTY = {
    "core": {"torch", "pluggy", "typing_extensions"},
    "trust": {"torch", "typing_extensions"},
    "cpu": {"torch", "pluggy"},
    "cuda": {"torch", "pluggy", "cuda", "triton"},
    "ascend": {"torch", "pluggy", "torch_npu", "acl"},
    "accelerator": {"torch", "pluggy"},
}
UPPER = ("compile", "attention", "observe", "hosts", "ranks", "testing", "demo", "cli")
"""What sits on top: each may use core, the platforms' packages and those before it."""


VERSION = "graphrt._version"
"""A number that everything may read."""

SURFACE = {
    "graphrt",
    *(f"graphrt.{name}" for name in (*PLATFORMS, *UPPER)),
    "graphrt.ascend.attention",
    "graphrt.hosts.transformers",
    "graphrt.hosts.diffusers",
    "graphrt.hosts.vllm",
    "graphrt.hosts.sglang",
    "graphrt.hosts.vllm_ascend",
}
"""Packages that hosts import names from. Of any other folder the modules are imported."""


def module_of(path: Path) -> str:
    """The dotted name of a file; a package's is that of its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}
PACKAGES = {name for name, path in MODULES.items() if path.name == "__init__.py"}


FACELESS = {name for name in PACKAGES if name not in SURFACE}
FIRST = "graphrt.core"
"""It imports torch before anything of core does, and says what makes that fail."""


def folder_of(module: str) -> str:
    return module if module in PACKAGES else module.rpartition(".")[0]


def imported(source: str, package: str) -> Iterator[tuple[str, str]]:
    """(module, name) for everything that `source`, a module of `package`, imports anywhere."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            module = importlib.util.resolve_name(relative, package) if node.level else relative
            yield from ((module, alias.name) for alias in node.names)


def part_of(module: str) -> str:
    """ "core" for graphrt.core.replay.pool, "" for graphrt itself and its public modules."""
    parts = module.split(".")
    inner = len(parts) > 2 or (len(parts) == 2 and module in PACKAGES)
    return parts[1] if inner else ""


def breaches(user: str, source: str) -> list[str]:
    """What the module `user` imports and may not."""
    return [breach for breach in _breaches(user, source) if breach]


def _breaches(user: str, source: str) -> Iterator[str]:
    own, folder = part_of(user), folder_of(user)
    for module, name in imported(source, folder):
        top = module.partition(".")[0]
        if top != "graphrt":
            known = THIRD_PARTY.get(own)
            if known is not None and top not in sys.stdlib_module_names | known:
                yield f"{module}: {own} does not depend on it"
            continue
        whole = f"{module}.{name}"
        if module in FACELESS and name and whole not in MODULES:
            yield f"{module} defines nothing: import {name} from the module that does"
        yield from _wrong_part(user, whole if whole in MODULES else module)


def _wrong_part(user: str, target: str) -> Iterator[str]:
    own, other = part_of(user), part_of(target)
    if target == VERSION:
        return
    if not own or own == other:
        if own == "core" == other:
            layers = [name.split(".")[2] if name.count(".") > 1 else "" for name in (user, target)]
            if all(layers) and LAYERS.index(layers[1]) > LAYERS.index(layers[0]):
                yield f"{target} is above {layers[0]}"
        return
    if own == "core" or (own in LOWER and other != "core"):
        yield f"{own} imports {target}"
    elif own in UPPER and other in UPPER and UPPER.index(other) > UPPER.index(own):
        yield f"{target} is above {own}"


def test_the_layout_check_covers_core_layers_and_surface() -> None:
    assert {f"graphrt.core.{layer}" for layer in LAYERS} <= FACELESS
    assert SURFACE <= PACKAGES


@pytest.mark.parametrize("module", MODULES)
def test_each_module_imports_only_from_lower_layers(module: str) -> None:
    assert breaches(module, MODULES[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_package_folder_has_a_docstring(folder: Path) -> None:
    init = folder / "__init__.py"
    assert init.exists() and ast.get_docstring(ast.parse(init.read_text(encoding="utf-8")))


@pytest.mark.parametrize("package", sorted(FACELESS - {FIRST}))
def test_an_internal_packages_init_file_defines_nothing(package: str) -> None:
    """A list of names there is a second home for each of them."""
    body = ast.parse(MODULES[package].read_text(encoding="utf-8")).body
    assert [ast.unparse(each) for each in body[1:]] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Type-only imports are counted too: what cannot be named without a circle cannot be read
    without one."""
    edges: dict[str, set[str]] = defaultdict(set)
    for user, path in MODULES.items():
        for module, name in imported(path.read_text(encoding="utf-8"), folder_of(user)):
            target = f"{module}.{name}" if f"{module}.{name}" in MODULES else module
            if target in MODULES and target != user:
                edges[user].add(target)
    assert circles(edges) == []


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that all lead to each other (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(edges.get(name, ())):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for name in sorted(edges):
        if name not in order:
            visit(name)
    return groups


@pytest.mark.parametrize(
    ("user", "source"),
    [
        ("graphrt.core.batch.modes", "import graphrt.cpu"),
        ("graphrt.core.batch.modes", "from graphrt import cpu"),
        ("graphrt.core.batch.modes", "from ...cpu import CpuPlatform"),
        ("graphrt.core.replay.pool", "def late():\n    from graphrt.cuda import CudaPlatform"),
        ("graphrt.core.replay.pool", "from graphrt.core.runner.runner import GraphRunner"),
        ("graphrt.core.replay.pool", "from graphrt.core.batch import GraphMode"),
        ("graphrt.core.batch.modes", "import numpy"),
        ("graphrt.core.batch.modes", "import torch_npu"),
        ("graphrt.cpu.platform", "from graphrt.cuda import CudaPlatform"),
        ("graphrt.cpu.platform", "from graphrt.demo import run_demo"),
        ("graphrt.cuda.platform", "import torch_npu"),
        ("graphrt.attention.sdpa", "from graphrt.cli import app"),
    ],
)
def test_the_layout_check_finds_forbidden_imports(user: str, source: str) -> None:
    assert breaches(user, source)


@pytest.mark.parametrize(
    ("user", "source"),
    [
        ("graphrt.core.replay.pool", "import os, torch, pluggy"),
        ("graphrt.core.replay.pool", "from graphrt.core.batch.context import ForwardContext"),
        ("graphrt.core.replay.pool", "from graphrt.core.replay.entry import Segment"),
        ("graphrt.cpu.tape.recorder", "from graphrt.cpu.arena import Arena"),
        ("graphrt.cuda.platform", "from cuda.bindings import driver"),
        ("graphrt.cli.plan", "from graphrt import Plan"),
    ],
)
def test_the_layout_check_accepts_allowed_imports(user: str, source: str) -> None:
    assert breaches(user, source) == []


def test_the_layout_check_finds_import_circles() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": {"c"}, "d": {"a"}}) == []
