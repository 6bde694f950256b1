"""`OpaqueAttention`: attention backends inside of compiled models."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from graphrt import Batch, GraphMode, GraphPool, GraphRunner, InputSpec, Reason
from graphrt.attention import (
    GroupedShape,
    OpaqueAttention,
    SdpaAttention,
    supports_of,
)
from graphrt.compile import CompileOptions, compile_module
from graphrt.core.base.errors import InvalidInputError, InvalidOptionError
from graphrt.core.batch.context import ForwardContext

SHAPE = GroupedShape(4, 2, 16, page_size=16)
REQS, PAGES = 4, 3
NUMBERS = itertools.count()
WIDTH = SHAPE.num_heads * SHAPE.head_dim
DIMS = {
    "x": 0,
    "block_table": {0: "reqs"},
    "context_lens": {0: "reqs"},
    "query_start_loc": {0: "reqs+1"},
}
INPUTS = {
    "x": InputSpec(torch.float32, ("tokens", WIDTH)),
    "block_table": InputSpec(torch.int32, ("reqs", PAGES), pad=0, index=True),
    "context_lens": InputSpec(torch.int32, ("reqs",)),
    "query_start_loc": InputSpec(torch.int32, ("reqs+1",), pad="repeat"),
}


class Layers(nn.Module):
    """Layers of attention over caches that are filled already."""

    def __init__(self, attention: OpaqueAttention, layers: int, device: str) -> None:
        super().__init__()
        self.attention = attention
        self.linears = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(layers)
        )
        cache = (REQS * PAGES, SHAPE.page_size, SHAPE.num_kv_heads, SHAPE.head_dim)
        self.caches = [
            tuple(torch.randn(cache, device=device) for _ in range(2)) for _ in range(layers)
        ]

    def forward(self, x, block_table, context_lens, query_start_loc):
        for linear, caches in zip(self.linears, self.caches, strict=True):
            query = linear(x).view(-1, SHAPE.num_heads, SHAPE.head_dim)
            heads = self.attention(
                query,
                *caches,
                block_table=block_table,
                context_lens=context_lens,
                query_start_loc=query_start_loc,
            )
            x = x + heads.flatten(1)
        return x


def step(lengths: list[int], queries: list[int], seed: int) -> tuple[Batch, dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    reqs, tokens = len(lengths), sum(queries)
    uniform = queries[0] if len(set(queries)) == 1 and queries[0] == 1 else None
    return Batch(tokens, reqs, uniform), {
        "x": torch.randn(tokens, WIDTH, generator=generator),
        "block_table": torch.arange(reqs * PAGES, dtype=torch.int32).view(reqs, PAGES),
        "context_lens": torch.tensor(lengths, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, *queries], dtype=torch.int32).cumsum(0).int(),
    }


STEPS = [
    step([5, 40, 17], [1, 1, 1], 0),
    step([33, 8], [1, 1], 1),
    step([9, 30, 2], [4, 1, 2], 2),
    step([48], [1], 3),
    step([20, 20], [3, 5], 4),
]


def backend_of(kind: str, device: str) -> Any:
    if kind == "sdpa":
        return SdpaAttention(SHAPE)
    pytest.importorskip("triton", reason="Triton is not installed")
    from graphrt.attention import TritonAttention

    return TritonAttention(SHAPE, max_num_reqs=REQS, dtype=torch.float32, device=device)


def check(
    kind: str,
    device: str,
    options: CompileOptions,
    *,
    own_wrappers: bool = True,
    layers: int = 3,
    steps: Sequence[tuple[Batch, dict[str, Any]]] = STEPS,
) -> None:
    torch.manual_seed(0)
    attention = OpaqueAttention(backend_of(kind, device), f"test{next(NUMBERS)}")
    model = Layers(attention, layers, device)
    pool = GraphPool(device)
    compiled = compile_module(
        model, DIMS, options=options, pool=pool if own_wrappers else None, in_place=False
    )
    runner = GraphRunner(
        compiled,
        mode="FULL_AND_PIECEWISE",
        sizes=[1, 2, 4, 8],
        max_num_tokens=8,
        max_num_reqs=REQS,
        inputs=INPUTS,
        outputs=("tokens", WIDTH),
        attention=supports_of(attention.backend),
        pool=pool,
    )
    with runner:
        runner.capture()
        state = dict(vars(attention))
        assert compiled.figures.splitting_pieces == (0 if compiled.figures.partitions else layers)
        for batch, values in steps:
            output = runner.verify(batch, **values).clone()
            mode = GraphMode.FULL if batch.query_len else GraphMode.PIECEWISE
            assert runner.last_dispatch.mode is mode
            with torch.no_grad():
                eager = model(**{name: each.to(device) for name, each in values.items()})
            torch.testing.assert_close(output, eager, rtol=1e-4, atol=1e-4)
        # A trial asks what a model does when its state has moved on.
        assert vars(attention) == state


@pytest.mark.parametrize(
    ("kind", "own_wrappers"),
    [
        ("sdpa", True),
        ("sdpa", False),
        # Who wraps the pieces does not depend on the kernels, which are interpreted here.
        pytest.param("triton", True, marks=pytest.mark.long),
        pytest.param("triton", False, marks=pytest.mark.long),
    ],
)
def test_attention_of_a_compiled_model_runs_in_full_graphs_or_between_pieces(kind, own_wrappers):
    # A verified step runs five times: of interpreted kernels one by each mode.
    layers, steps = (2, STEPS[1:3]) if kind == "triton" else (3, STEPS)
    check(kind, "cpu", CompileOptions(), own_wrappers=own_wrappers, layers=layers, steps=steps)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["sdpa", "triton"])
@pytest.mark.parametrize("partition", [False, True])
def test_opaque_attention_works_in_a_model_compiled_by_inductor_on_a_gpu(kind, partition, tmp_path):
    options = CompileOptions(
        backend="inductor", use_inductor_graph_partition=partition, cache_dir=str(tmp_path)
    )
    check(kind, "cuda", options)


def test_the_attention_backend_begins_a_step_once_for_all_layers(monkeypatch):
    attention = OpaqueAttention(SdpaAttention(SHAPE), "begun once")
    begun = []
    begin = SdpaAttention.begin
    monkeypatch.setattr(
        SdpaAttention, "begin", lambda *args, **kwargs: begun.append(1) or begin(*args, **kwargs)
    )
    model = Layers(attention, 3, "cpu")
    with GraphRunner(
        model,
        inputs=INPUTS,
        mode="NONE",
        sizes=[8],
        platform="cpu",
    ) as runner:
        for batch, values in STEPS:
            runner(batch, **values)
    assert len(begun) == len(STEPS)


def test_an_uncompiled_model_is_captured_in_pieces_around_opaque_attention():
    torch.manual_seed(0)
    attention = OpaqueAttention(SdpaAttention(SHAPE), f"test{next(NUMBERS)}")
    with GraphRunner(
        Layers(attention, 3, "cpu"),
        mode="PIECEWISE",
        sizes=[1, 2, 4, 8],
        max_num_tokens=8,
        max_num_reqs=REQS,
        inputs=INPUTS,
        outputs=("tokens", WIDTH),
        platform="cpu",
    ) as runner:
        runner.capture()
        for batch, values in STEPS:
            runner.verify(batch, **values)
            assert runner.last_dispatch.mode is GraphMode.PIECEWISE


@pytest.mark.filterwarnings("error::graphrt.errors.GraphQuarantinedWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_uniform_and_mixed_batches_in_turn_keep_every_graph_of_opaque_attention(compiled):
    torch.manual_seed(0)
    attention = OpaqueAttention(SdpaAttention(SHAPE), f"test{next(NUMBERS)}")
    model = Layers(attention, 3, "cpu")
    pool = GraphPool("cpu")
    forward = compile_module(model, DIMS, pool=pool, in_place=False) if compiled else model
    runner = GraphRunner(
        forward,
        mode="FULL_AND_PIECEWISE",
        sizes=[4, 8],
        max_num_tokens=8,
        max_num_reqs=REQS,
        inputs=INPUTS,
        outputs=("tokens", WIDTH),
        attention=supports_of(attention.backend),
        pool=pool,
    )
    with runner:
        runner.capture()
        for index, queries in enumerate([[3, 2], [3], [5, 1], [1, 1], [5], [4, 4], [2, 1]]):
            _, values = step([9 + each for each in queries], queries, index)
            same = queries[0] if len(set(queries)) == 1 else None
            output = runner(Batch(sum(queries), len(queries), same), **values).clone()
            assert runner.last_dispatch.reason is Reason.HIT
            with torch.no_grad():
                torch.testing.assert_close(output, model(**values), rtol=1e-4, atol=1e-4)
        assert {each.status for each in runner.report().trust.trials} <= {"tried", "untried"}


def attended(attention: OpaqueAttention) -> torch.Tensor:
    values = {name: each for name, each in STEPS[0][1].items() if name != "x"}
    cache = torch.ones(REQS * PAGES, SHAPE.page_size, SHAPE.num_kv_heads, SHAPE.head_dim)
    return attention(torch.ones(3, SHAPE.num_heads, SHAPE.head_dim), cache, cache, **values)


def test_calling_a_copy_of_opaque_attention_is_refused():
    model = Layers(OpaqueAttention(SdpaAttention(SHAPE), f"test{next(NUMBERS)}"), 1, "cpu")
    with ForwardContext(GraphMode.NONE):
        before = attended(model.attention)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for each in copies:
        with pytest.raises(InvalidOptionError, match="belongs to the original"):
            attended(each.attention)
        each.attention = OpaqueAttention(SdpaAttention(SHAPE), f"test{next(NUMBERS)}")
        assert torch.equal(attended(each.attention), before)
    assert torch.equal(attended(model.attention), before)


def test_compiling_a_copied_model_with_opaque_attention_is_refused():
    attention = OpaqueAttention(SdpaAttention(SHAPE), f"test{next(NUMBERS)}")
    model = copy.deepcopy(Layers(attention, 1, "cpu"))
    compiled = compile_module(model, DIMS)
    with pytest.raises(InvalidOptionError, match="belongs to the original"):
        compiled(**STEPS[0][1])


def test_unpickled_opaque_attention_works_once_the_original_is_gone():
    stored = pickle.dumps(OpaqueAttention(SdpaAttention(SHAPE), "stored"))
    attention = pickle.loads(stored)
    assert attended(attention).shape == (3, SHAPE.num_heads, SHAPE.head_dim)


def test_a_second_opaque_attention_of_the_same_name_is_refused():
    first = OpaqueAttention(SdpaAttention(SHAPE), "mine")
    with pytest.raises(InvalidOptionError, match="one name"):
        OpaqueAttention(SdpaAttention(SHAPE), "mine")
    del first
    gc.collect()
    again = OpaqueAttention(SdpaAttention(SHAPE), "mine")
    assert attended(again).shape == (3, SHAPE.num_heads, SHAPE.head_dim)


def test_a_name_is_free_once_its_attention_is_unreachable():
    held: list[Any] = [OpaqueAttention(SdpaAttention(SHAPE), "in a cycle")]
    held.append(held)
    gc.disable()
    try:
        del held
        OpaqueAttention(SdpaAttention(SHAPE), "in a cycle")
    finally:
        gc.enable()


def test_the_attend_operator_names_a_missing_attention_backend():
    values = STEPS[0][1]
    with pytest.raises(InvalidInputError, match="is not there"):
        torch.ops.graphrt.attend(
            torch.zeros(3, 4, 16),
            [],
            values["block_table"],
            values["context_lens"],
            None,
            torch.zeros(3, 4, 16),
            "gone",
        )
