"""Every name of torch that is not public: where it is declared, and in which torch it is found."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from graphrt.core.base.errors import MissingTorchNameError
from graphrt.core.base.private_torch import (
    TESTED,
    PrivateName,
    PrivateNames,
)
from tests import starts

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "graphrt").rglob("*.py"))
MECHANISM = ROOT / "graphrt" / "core" / "base" / "private_torch.py"
VERSION = ".".join(torch.__version__.split(".")[:2])

_PRIVATE_PATH = re.compile(r"torch(_npu)?(\.\w+)*\._[a-zA-Z0-9]\w*(\.\w+)*")


@cache
def doors() -> dict[Path, dict[str, PrivateName]]:
    """What each module declares that holds a `PrivateNames`, whatever it calls it."""
    names_by_path = {}
    for path in FILES:
        if path == MECHANISM or "PrivateNames()" not in path.read_text(encoding="utf-8"):
            continue
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        held = [
            v for v in vars(importlib.import_module(name)).values() if isinstance(v, PrivateNames)
        ]
        names_by_path[path] = {key: name for names in held for key, name in names.declared.items()}
    return names_by_path


def table() -> Iterator[object]:
    for path, declared in doors().items():
        package = path.relative_to(ROOT / "graphrt").parts[0]
        for name in declared.values():
            marks = [pytest.mark.npu] if name.build == "npu" else []
            yield pytest.param(name, id=f"{package}-{name.path}", marks=marks)


@pytest.mark.parametrize("name", list(table()))
def test_each_private_torch_name_exists_in_its_recorded_torch_versions(name: PrivateName) -> None:
    if name.build == "cuda" and not torch.backends.cuda.is_built():
        pytest.skip(f"torch {torch.__version__} was built without CUDA")
    try:
        name.find()
    except MissingTorchNameError:
        assert VERSION not in name.seen, f"torch {VERSION} lost {name.path}: {name.without}"


def test_core_and_each_platform_declare_their_private_torch_names() -> None:
    packages = {path.relative_to(ROOT / "graphrt").parts[0] for path in doors()}
    assert {"core", "cpu", "cuda", "ascend"} <= packages


@pytest.mark.parametrize("path", list(doors()), ids=lambda path: str(path.relative_to(ROOT)))
def test_each_private_torch_name_declares_the_effect_of_its_absence(path: Path) -> None:
    assert doors()[path]
    for name in doors()[path].values():
        assert name.without and set(name.seen) <= set(TESTED), name


def private_uses(source: str) -> list[str]:
    """The private names of torch and torch_npu that a module says."""
    uses = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            uses.append(ast.unparse(node))
        elif isinstance(node, ast.Import):
            uses += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            uses += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            uses.append(node.value)
    return [each for each in uses if _PRIVATE_PATH.fullmatch(each)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_torch_names_are_used_only_in_their_declaring_modules(path: Path) -> None:
    # The door of graphrt.compile is a folder.
    if path == MECHANISM or path in doors() or path.parent.name == "private_torch":
        return
    assert private_uses(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch import _C",
        "from torch._C import _len_torch_dispatch_stack",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "def f():\n    return torch._C._cuda_getDevice()",
        "torch.utils._pytree.tree_map(f, x)",
        "sys.modules['torch._dynamo.eval_frame']",
        "torch_npu._C._weak_ref_tensor(x)",
    ],
)
def test_the_check_finds_undeclared_private_torch_names(source: str) -> None:
    assert private_uses(source)


@pytest.mark.parametrize(
    "source", ["torch.__version__", "torch.Tensor.copy_", "'torch.cuda.Event.wait is replaced'"]
)
def test_the_check_accepts_public_torch_names(source: str) -> None:
    assert not private_uses(source)


# What is missing or new --------------------------------------------------------------------------


def test_a_missing_private_torch_name_raises_when_used() -> None:
    names = PrivateNames()
    missing = names.take("torch._C._no_such_function", without="nothing works", seen=("2.11",))
    assert not missing
    with pytest.raises(MissingTorchNameError, match="_no_such_function") as caught:
        missing(1)
    assert "nothing works" in str(caught.value) and "2.11" in str(caught.value)
    declared = names.declare("torch._no_such_module.name", without="nothing works")
    with pytest.raises(MissingTorchNameError, match="_no_such_module"):
        declared.find()


_WITHOUT_ANY = """
import sys, types
ROOT = sys.argv[1]
# Only what the doors are made with, so that it can be changed before they are imported.
for name in ("graphrt", "graphrt.core", "graphrt.core.base"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [ROOT + "/" + name.replace(".", "/")]
from graphrt.core.base import errors, private_torch
for name in ("graphrt", "graphrt.core", "graphrt.core.base"):
    del sys.modules[name]

def find(self):
    raise errors.MissingTorchNameError(self.path)

private_torch.PrivateName.find = find
import graphrt, graphrt.cpu, graphrt.cuda, graphrt.ascend, graphrt.accelerator, torch
try:
    graphrt.cpu.TapeGraph().capture_begin(graphrt.cpu.Arena())
except errors.MissingTorchNameError as error:
    print(error)
try:
    graphrt.cuda.CudaPlatform().current_stream_id()
except errors.MissingTorchNameError as error:
    print(error)
"""


def test_graphrt_imports_without_any_private_torch_name() -> None:
    done = starts.run("-c", _WITHOUT_ANY, str(ROOT), check=True)
    assert done.stdout.splitlines() == [
        "torch._C._dispatch_library",
        "torch._C._cuda_getDevice",
    ]
