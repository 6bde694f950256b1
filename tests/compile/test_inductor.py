"""Pieces through Inductor: near eager, captured like others, kept over starts. Few: it is slow."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
from test_compile_runner import llama_runner

from graphrt import Batch, GraphMode, GraphPool
from graphrt.compile import CompileOptions, compile_module
from graphrt.compile.backend.choice import EagerBackend, backend_for
from tests.models.llama import Llama, step_inputs

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="Inductor on the CPU needs g++"
)


def options(tmp_path: Any, **more: Any) -> CompileOptions:
    given: dict[str, Any] = {"backend": "inductor", "cache_dir": str(tmp_path / "kept"), **more}
    return CompileOptions(**given)


@needs_compiler
def test_pieces_through_inductor(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch.manual_seed(0)
    model = Llama(layers=3)
    original = copy.deepcopy(model)
    pool = GraphPool("cpu")
    compiled = compile_module(model, pool=pool, options=options(tmp_path))
    with llama_runner(model, pool) as runner:
        runner.capture()
        assert compiled.figures.backend == "inductor"
        assert (compiled.figures.compilations, compiled.figures.loads) == (3, 0)
        for step, size in enumerate((1, 2, 3, 8, 11)):
            inputs = step_inputs(size, step=step)
            with torch.no_grad():
                eager = original(**inputs)
            for batch in (Batch(size, size, 1), Batch(size, size)):
                found = runner.verify(batch, **inputs)
                torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-5)
        assert runner.last_dispatch.mode is GraphMode.NONE

    for name in ("computation_graph.py", "transformed_code.py"):
        assert list((tmp_path / "kept").rglob(name))

    again = compile_module(copy.deepcopy(original), options=options(tmp_path))
    again.ensure_compiled(**step_inputs(4))
    assert (again.figures.compilations, again.figures.loads) == (0, 3)
    torch.testing.assert_close(
        again(**step_inputs(5)), original(**step_inputs(5)), rtol=1e-4, atol=1e-5
    )


@needs_compiler
def test_a_size_of_its_own_through_inductor(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))

    def forward(x):
        return (x.view(x.shape[0] * 2, 2) * 3).relu()

    given = options(tmp_path, compile_sizes=(4,), autotune=False)
    compiled = compile_module(forward, ["x"], options=given, capture_sizes=[2, 4])
    for size in (4, 2, 1):
        x = torch.randn(size, 4)
        torch.testing.assert_close(compiled(x), forward(x))
    assert (compiled.figures.compilations, compiled.figures.static_compilations) == (2, 1)


def test_a_device_without_inductor_gets_eager_pieces_with_a_reason():
    backend, reason = backend_for("inductor", "meta")
    assert isinstance(backend, EagerBackend)
    assert "'meta'" in reason


@needs_compiler
def test_the_old_value_of_an_input_that_is_written_is_kept(tmp_path, caplog):
    def forward(x, y):
        x.copy_(y)
        y.neg_()
        return y + 1

    compiled = compile_module(forward, ["x", "y"], options=options(tmp_path))
    found, expected = ([torch.arange(8.0).view(2, 4), torch.ones(2, 4)] for _ in "ab")
    assert torch.equal(compiled(*found), forward(*expected))
    assert all(map(torch.equal, found, expected))
    assert "runs uncompiled" in caplog.text
