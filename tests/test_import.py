"""Importing graphrt is cheap: nothing heavy is loaded and no device is touched."""

from __future__ import annotations

import subprocess
import sys

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
    result = subprocess.run(
        [sys.executable, "-c", CHECK], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines() == ["[] [] False False", "True"]


def test_what_compiles_is_found_in_the_package_and_may_be_called() -> None:
    import graphrt

    assert callable(graphrt.compile) and graphrt.compile.compile_module is not None
    assert graphrt.support_compile is graphrt.compile.support_compile
    assert graphrt.opaque is graphrt.compile.opaque is graphrt.compile.split.define.opaque
    assert not hasattr(graphrt, "no_such_name")
