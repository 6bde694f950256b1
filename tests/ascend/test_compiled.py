"""Compiled pieces as ACL graphs: no Inductor there, so the eager backend serves them."""

from __future__ import annotations

import copy

import pytest
import torch
from attention_models import BLOCK, HEADS, MAX_KV, Decoder, differing, eager_outputs, replayed
from test_ascend_modes import runner as ascend_runner
from test_ascend_modes import steps as ascend_steps

from graphrt import GraphMode, GraphPool
from graphrt.ascend.attention import fused_infer_attention
from graphrt.compile import CompileOptions, compile_module, opaque
from tests.models.llama import Llama, check_both_modes, llama_runner

pytestmark = pytest.mark.npu


@pytest.mark.parametrize("own_wrappers", [True, pytest.param(False, marks=pytest.mark.long)])
def test_compiling_without_inductor_gives_eager_pieces_and_a_reason(tmp_path, own_wrappers):
    torch.manual_seed(0)
    model = Llama(layers=3).to("npu")
    original = copy.deepcopy(model)
    pool = GraphPool("ascend")
    options = CompileOptions(
        backend="inductor", use_inductor_graph_partition=True, cache_dir=str(tmp_path)
    )
    compiled = compile_module(model, pool=pool if own_wrappers else None, options=options)
    with llama_runner(model, pool, pieces="auto") as runner:
        runner.capture()
        figures = compiled.figures
        assert figures.backend == "eager" and "npu" in figures.backend_reason
        # Three pieces that differ, and the whole forward for FULL.
        assert figures.compilations == 4 and len(compiled.wrappers) == 4 * own_wrappers
        check_both_modes(runner, original, exact=True)


TASK = fused_infer_attention(max_kv_len=MAX_KV, spare_request=True)


@opaque("graphrt_tests::npu_attention", mutates=["out"])
def npu_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    layer: int,
) -> None:
    """A task in one graph; in pieces eager, with the lengths of the step."""
    lse = torch.empty(1, dtype=torch.float32, device=query.device)
    TASK(
        query,
        keys,
        values,
        block_table=table,
        input_layout="TND",
        block_size=BLOCK,
        num_heads=HEADS,
        num_key_value_heads=HEADS,
        scale=0.5,
        out=[out, lse],
        task=f"layers.{layer}",
    )


class CompiledDecoder(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.caches = Decoder(layers).caches

    def forward(self, x: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
        for layer, (keys, values) in enumerate(self.caches):
            query = x * 0.5
            out = torch.empty_like(query)
            npu_attention(query, keys, values, block_table, out, layer)
            x = query + out
        return x


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("own_wrappers", [True, False])
def test_attention_operators_are_tasks_in_full_graphs_and_eager_between_pieces(
    decode, own_wrappers
):
    pool = GraphPool("ascend")
    compiled = compile_module(
        CompiledDecoder(3),
        {"x": 0, "block_table": {0: "reqs+1"}},
        pool=pool if own_wrappers else None,
        in_place=False,
    )
    with ascend_runner("FULL_AND_PIECEWISE", forward=compiled, pool=pool) as run:
        run.capture()
        assert compiled.figures.pieces == 4 and compiled.figures.splitting_pieces == 3
        outputs, todo = [], ascend_steps(40, decode=decode, seed=7)
        for step in todo:
            outputs.append(replayed(run, step).cpu())
            assert run.last_dispatch.mode is (GraphMode.FULL if decode else GraphMode.PIECEWISE)
        assert differing(outputs, eager_outputs(run, todo)) == []
