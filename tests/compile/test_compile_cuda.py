"""Compiled pieces as CUDA graphs: FULL and PIECEWISE of the same pieces, equal to eager calls."""

from __future__ import annotations

import copy

import pytest
import torch
from compile_llama import Llama, step_inputs
from test_compile_runner import llama_runner
from torch._dynamo.utils import counters

from graphrt import Batch, GraphMode, GraphPool
from graphrt.compile import CompileOptions, compile_module

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_full_and_piecewise_come_from_the_same_pieces_on_a_gpu(tmp_path, backend):
    torch.manual_seed(0)
    model = Llama(layers=3).cuda()
    original = copy.deepcopy(model)
    pool = GraphPool("cuda")
    options = CompileOptions(backend=backend, cache_dir=str(tmp_path))
    compiled = compile_module(model, pool=pool, options=options)
    with llama_runner(model, pool) as runner:
        runner.capture()
        assert compiled.figures.backend == backend
        assert compiled.figures.compilations == 3 and len(compiled.wrappers) == 4
        before = copy.deepcopy(counters)
        for step, size in enumerate((1, 2, 3, 8, 5, 1)):
            inputs = step_inputs(size, step=step)
            uniform = runner.verify(Batch(size, size, 1), **inputs).clone()
            assert runner.last_dispatch.mode is GraphMode.FULL
            mixed = runner.verify(Batch(size, size), **inputs).clone()
            assert runner.last_dispatch.mode is GraphMode.PIECEWISE
            with torch.no_grad():
                eager = original(**{name: each.cuda() for name, each in inputs.items()})
            assert torch.equal(uniform, mixed)
            torch.testing.assert_close(uniform, eager, rtol=1e-4, atol=1e-4)
        assert counters == before


def test_a_thousand_batches_compile_and_capture_nothing_on_a_gpu(tmp_path):
    torch.manual_seed(0)
    model = Llama(layers=2).cuda()
    pool = GraphPool("cuda")
    options = CompileOptions(backend="inductor", cache_dir=str(tmp_path))
    compiled = compile_module(model, pool=pool, options=options)
    with llama_runner(model, pool) as runner:
        runner.capture()
        entries = sum(len(wrapper.entries) for wrapper in compiled.wrappers)
        compilations, before = compiled.figures.compilations, copy.deepcopy(counters)
        sizes = torch.randint(1, 16, (998,), generator=torch.Generator().manual_seed(0)).tolist()
        for place, size in enumerate([1, 2, *sizes]):
            query_len = 1 if place % 2 else None
            inputs = {name: each.cuda() for name, each in step_inputs(size).items()}
            runner(Batch(size, size, query_len), **inputs)
        assert compiled.figures.compilations == compilations
        assert sum(len(wrapper.entries) for wrapper in compiled.wrappers) == entries
        assert counters == before
