"""Importing graphrt is cheap: nothing heavy is loaded and no device is touched."""

from __future__ import annotations

import ast
from pathlib import Path

from tests import starts

CHECK = """
import sys, torch
before = set(sys.modules)
import graphrt
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
heavy = {"typer", "rich", "triton", "torch_npu", "numpy", "safetensors", "tokenizers"} & loaded
packages = ("graphrt.cpu", "graphrt.cuda", "graphrt.ascend", "graphrt.accelerator")
platforms = {n for n in sys.modules if n.startswith(packages)}
dynamo = "torch._dynamo" in set(sys.modules) - before
print(sorted(heavy), sorted(platforms), dynamo, torch.cuda.is_initialized())
print(all(hasattr(graphrt, name) for name in graphrt.__all__))
"""


def test_import_loads_nothing_heavy_and_touches_no_device():
    result = starts.run("-c", CHECK, check=True)
    assert result.stdout.splitlines() == ["[] [] False False", "True"]


def test_graphrt_compile_is_callable_and_has_its_modules_names() -> None:
    import graphrt

    assert callable(graphrt.compile) and graphrt.compile.compile_module is not None
    assert graphrt.support_compile is graphrt.compile.support_compile
    assert graphrt.opaque is graphrt.compile.opaque is graphrt.compile.split.define.opaque
    assert not hasattr(graphrt, "no_such_name")


LATE = """
import sys
from graphrt import GraphRunner, Plan
loaded = {name for name in sys.modules if name.startswith("graphrt.")}
print(sorted({".".join(name.split(".")[:3]) for name in loaded if name.count(".") > 2}))
print(sorted(name for name in loaded if name.startswith("graphrt.core.runner.")))
import graphrt
print(set(graphrt.__all__) <= set(dir(graphrt)), "testing" in dir(graphrt))
"""


def test_importing_a_name_loads_only_the_modules_of_that_name() -> None:
    done = starts.run("-c", LATE, check=True)
    layers, runner, listed = done.stdout.splitlines()
    assert "graphrt.core.plan" in layers and "graphrt.trust" not in layers
    assert runner == "['graphrt.core.runner.runner']"
    assert listed == "True False"


def test_lazy_names_are_loaded_from_the_modules_type_checkers_see() -> None:
    import graphrt

    tree = ast.parse(Path(graphrt.__file__).read_text(encoding="utf-8"))
    (seen,) = (
        node.body
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    checked = {
        alias.name: str(node.module).removeprefix("graphrt.")
        for node in seen
        if isinstance(node, ast.ImportFrom) and node.module != "graphrt"
        for alias in node.names
    }
    assert checked.pop("compile_module") == "compile"
    assert checked == graphrt._DEFINED_IN
    assert {*checked, "compile", "__version__"} == set(graphrt.__all__)
