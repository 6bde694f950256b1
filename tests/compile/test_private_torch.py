"""The folder that looks up private names of torch: it declares every name, looks each up when it is
used, and no other module of graphrt.compile uses one."""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import graphrt.compile
from graphrt.compile.private_torch import patches
from graphrt.compile.private_torch.names import NAMES, private_attribute
from graphrt.core.base.errors import MissingTorchNameError
from graphrt.core.base.private_torch import TESTED
from tests import starts

ROOT = Path(str(graphrt.compile.__file__)).parent
DOOR = ROOT / "private_torch"
RUNNING = ".".join(torch.__version__.split(".")[:2])


def private_names(source: str) -> Iterator[str]:
    """What `source` takes of torch by a name with an underscore, at any depth: "torch._ops"."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            top, *parts = name.split(".")
            if top == "torch" and any(p[0] == "_" and not p.startswith("__") for p in parts):
                yield name


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch._ops", ["torch._ops"]),
        ("def f():\n    from torch._inductor import config", ["torch._inductor.config"]),
        ("from torch import _C, nn", ["torch._C"]),
        ("from torch.utils._triton import has_triton", ["torch.utils._triton.has_triton"]),
        ("torch._check(x)", ["torch._check"]),
        ("torch.__version__, torch.fx.Graph, self._torch, 'torch._C'  # torch._C", []),
    ],
)
def test_the_check_of_this_file_finds_private_names_of_torch(source: str, found: list[str]):
    assert list(private_names(source)) == found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_private_names_of_torch_are_used_in_their_own_folder_only(path: Path):
    if DOOR not in path.parents:
        assert list(private_names(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("name", sorted(NAMES.declared))
def test_a_declared_private_name_is_found_in_the_torch_versions_listed(name: str):
    declared = NAMES.declared[name]
    assert declared.without and set(declared.seen) <= set(TESTED)
    if RUNNING in declared.seen:
        declared.find()
    elif RUNNING in TESTED:
        with pytest.raises(MissingTorchNameError):
            declared.find()


def test_importing_graphrt_compile_imports_no_further_module_of_torch():
    code = (
        "import sys, torch; before = set(sys.modules); import graphrt.compile;"
        "print(sorted(n for n in set(sys.modules) - before if n.split('.')[0] == 'torch'))"
    )
    process = starts.run("-c", code, check=True)
    assert process.stdout.strip() == "[]"


def test_a_missing_private_attribute_is_named_by_the_error():
    with pytest.raises(MissingTorchNameError, match=r"SimpleNamespace .* has no guards") as caught:
        private_attribute(SimpleNamespace(), "guards", "modules cannot be compiled")
    assert "without it modules cannot be compiled" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "patch"),
    [
        ("load_async", lambda: patches.library_loads(lambda *_: None)),
        ("generate_and_run_autotune_block", patches.code_forgotten_after_tuning),
        ("cache_clear", patches.code_forgotten_after_tuning),
        ("load_autotuners", patches.kernels_loaded_as_tuned),
        ("compute_dependencies", patches.operators_in_order),
    ],
)
def test_a_missing_name_to_patch_gives_a_single_warning(
    name: str, patch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (declared,) = (n for path, n in NAMES.declared.items() if path.endswith(f".{name}"))
    owner, attribute = _owner_of(declared.path)
    patches._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="graphrt"), monkeypatch.context() as without:
        without.delattr(owner, attribute)
        for _ in range(2):
            with patch():
                assert attribute not in vars(owner)
    patches._warn_once.cache_clear()
    (line,) = [record.getMessage() for record in caplog.records]
    assert declared.path in line and "after a warning" in line


def test_a_patched_function_is_restored_after_an_error():
    owner, attribute = _owner_of("torch._inductor.codecache.CppCodeCache.load_async")
    before = vars(owner)[attribute]
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(ValueError, match="boom"))
        stack.enter_context(patches.library_loads(lambda *_: None))
        assert vars(owner)[attribute] is not before
        raise ValueError("boom")
    assert vars(owner)[attribute] is before


def _owner_of(path: str):
    owner, _, attribute = path.rpartition(".")
    module, _, name = owner.rpartition(".")
    return getattr(__import__(module, fromlist=[name]), name), attribute
