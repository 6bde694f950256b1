"""The levels of known attention backends: names, facts, and the rule that applies."""

from __future__ import annotations

import pytest
import torch

from graphrt.attention import GroupedShape, SdpaAttention
from graphrt.attention.levels.facts import FACTS
from graphrt.attention.levels.lookup import (
    facts_of,
    get_cudagraph_support,
    known_backend,
    known_backends,
    level_of,
)
from graphrt.core.base.errors import GraphRTError, InvalidOptionError
from graphrt.core.batch.modes import AttentionSupport
from graphrt.core.plan.resolution import resolve_mode

A, U, S, N = "ALWAYS", "UNIFORM_BATCH", "UNIFORM_SINGLE_TOKEN_DECODE", "NEVER"

PLAIN = {
    A: """flash-attention-3 flash-attention-4 triton-attention flex-attention flashinfer-mla
          flashmla-sparse-dsv4 flashinfer-sparse-dsv4 rocm-attention aiter-unified kda
          xpu-flash-attention ascend-fia graphrt-sdpa""",
    U: """flash-attention-2 flash-attn-mla flash-attn-mla-sparse flashmla flashmla-sparse
          flashinfer-mla-sparse trtllm-mha trtllm-mla tokenspeed-mla b12x triton-mla dsa-indexer dsa
          sparse-swa minimax-m3-sparse mamba mamba2 gdn short-conv bailing-linear aiter aiter-mla
          aiter-mla-sparse rocm-octave ascend-mla ascend-sfa ascend-dsa ascend-gdn
          graphrt-triton""",
    S: """flashinfer cutlass-mla linear-attention turboquant triton-flash-attn hpc-attn
          xpu-flash-attn-mla intel-amx ascend-paged""",
    N: "torch-sdpa chunked-local xpu-mla-sparse cpu-attn",
}
WITHOUT_FACTS = [(name, level) for level, names in PLAIN.items() for name in names.split()]

DCP = {"decode_context_parallel": 2}
WITH_FACTS = [
    ("flashinfer", {"trtllm_kernels": True}, U),
    ("flashinfer", {"trtllm_kernels": True, "causal": False}, S),
    ("flashinfer", {"xqa_kernels": True}, U),
    ("flashinfer", {"xqa_kernels": True, "causal": False}, U),
    ("flashinfer", {"fa2_kernels": True}, U),
    ("flashinfer", {"fa2_kernels": True, "causal": False}, S),
    ("flashinfer", {"fa2_kernels": True, "trtllm_kernels": True, "causal": False}, S),
    ("flashinfer", {"decode_context_parallel": 1, "trtllm_kernels": True}, U),
    ("flashinfer", {"trtllm_kernels": True} | DCP, S),
    ("flashinfer", {"xqa_kernels": True} | DCP, S),
    ("flashinfer", {"fa2_kernels": True} | DCP, S),
    ("flashinfer", {"trtllm_kernels": True, "decode_context_parallel": 8}, S),
    ("dsa-indexer", {"varlen_kernels": True}, A),
    ("dsa-indexer", {"flattened_queries": True}, A),
    ("hpc-attn", {"speculative": True}, U),
    ("torch-sdpa", {"static_cache": True}, S),
    ("triton-flash-attn", {"unclamped_window": True}, N),
]


@pytest.mark.parametrize(("name", "level"), WITHOUT_FACTS)
def test_a_backend_has_its_declared_level(name, level):
    assert get_cudagraph_support(name) is AttentionSupport[level]


def test_the_table_of_this_test_has_every_known_backend():
    assert sorted(name for name, _ in WITHOUT_FACTS) == sorted(b.name for b in known_backends())


@pytest.mark.parametrize(("name", "facts", "level"), WITH_FACTS)
def test_given_facts_choose_the_level_of_a_backend(name, facts, level):
    assert get_cudagraph_support(name, **facts) is AttentionSupport[level]


@pytest.mark.parametrize(
    "backend", [b for b in known_backends() if len(b.levels) > 1], ids=lambda b: b.name
)
def test_every_level_of_a_backend_can_be_reached(backend):
    """A row that an earlier one always hides would be a mistake in the table."""
    reached = set()
    for level in backend.levels:
        facts = {condition.fact: condition.value for condition in level.when}
        reached.add(level_of(backend.name, **facts))
    assert reached == set(backend.levels)


@pytest.mark.parametrize("backend", known_backends(), ids=lambda b: b.name)
def test_only_the_last_level_of_a_backend_is_unconditional(backend):
    assert [bool(level.when) for level in backend.levels] == [True] * (len(backend.levels) - 1) + [
        False
    ]


def test_conditions_name_facts_that_exist():
    used = {c.fact for b in known_backends() for level in b.levels for c in level.when}
    assert used == {fact.name for fact in FACTS}


def test_no_name_or_alias_means_two_backends():
    names = [name for b in known_backends() for name in (b.name, *b.aliases)]
    assert len(names) == len(set(names))
    assert all(known_backend(name).name == b.name for b in known_backends() for name in b.aliases)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("FA3", "flash-attention-3"),
        (" Flash_Attention_3 ", "flash-attention-3"),
        ("TRITON_ATTN", "triton-attention"),
        ("ROCM_AITER_FA", "aiter"),
        ("CUTLASS_MLA", "cutlass-mla"),
        ("gated_delta_net", "gdn"),
        ("npu_fused_infer_attention_score", "ascend-fia"),
        ("torch_native", "torch-sdpa"),
    ],
)
def test_names_are_found_in_any_spelling(name, canonical):
    assert known_backend(name).name == canonical


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("flash-attn", "flash-attention-2"), ("flashinfr", "flashinfer"), ("trition", "triton")],
)
def test_an_unknown_name_is_a_named_error_with_the_nearest(name, nearest):
    with pytest.raises(InvalidOptionError, match="unknown attention backend") as raised:
        get_cudagraph_support(name)
    assert isinstance(raised.value, GraphRTError)
    assert raised.value.got == repr(name)
    assert nearest in raised.value.expected and nearest in raised.value.advice


@pytest.mark.parametrize("name", ["", "no such thing"])
def test_a_name_like_no_known_backend_is_an_error_that_points_to_the_list(name):
    with pytest.raises(InvalidOptionError, match="graphrt attention"):
        get_cudagraph_support(name)


def test_an_unknown_fact_is_an_error_that_lists_the_known_facts():
    with pytest.raises(InvalidOptionError, match="unknown fact") as raised:
        get_cudagraph_support("flashinfer", trtlm_kernels=True)
    assert "decode_context_parallel" in raised.value.expected
    assert raised.value.advice.startswith("trtllm_kernels=")


@pytest.mark.parametrize(
    "facts",
    [
        {"causal": 1},
        {"causal": "yes"},
        {"decode_context_parallel": True},
        {"decode_context_parallel": 0},
        {"decode_context_parallel": 2.0},
        {"decode_context_parallel": None},
    ],
    ids=str,
)
def test_a_fact_of_the_wrong_type_or_range_is_refused(facts):
    with pytest.raises(InvalidOptionError, match="wrong value"):
        get_cudagraph_support("flash-attention-3", **facts)


def test_a_fact_that_a_backend_does_not_depend_on_changes_nothing():
    facts = {"decode_context_parallel": 4, "causal": False, "trtllm_kernels": True}
    assert get_cudagraph_support("flash-attention-3", **facts) is AttentionSupport.ALWAYS
    assert facts_of(known_backend("flash-attention-3")) == ()
    assert [f.name for f in facts_of(known_backend("dsa-indexer"))] == [
        "flattened_queries",
        "varlen_kernels",
    ]


def test_backends_with_deliberately_low_levels_are_marked_conservative():
    marked = {b.name for b in known_backends() for level in b.levels if level.conservative}
    assert marked == {
        "flash-attention-2",
        "turboquant",
        "torch-sdpa",
        "xpu-mla-sparse",
        "ascend-paged",
    }


def test_kernels_with_host_lengths_are_marked_for_task_update():
    marked = {b.name for b in known_backends() if b.task_update}
    assert marked == {"ascend-fia", "ascend-paged", "ascend-mla"}


def test_levels_of_several_backends_resolve_the_mode_of_a_hybrid_model():
    names = ["flash-attention-3", "mamba2", "gdn"]
    resolution = resolve_mode("FULL", attention={n: get_cudagraph_support(n) for n in names})
    assert resolution.mode.name == "FULL_AND_PIECEWISE"
    assert resolution.steps[0].backend == "mamba2"


def test_catalogue_levels_of_graphrt_backends_equal_their_declarations() -> None:
    triton = pytest.importorskip("graphrt.attention.triton.backend", reason="needs Triton")
    shape = GroupedShape(2, 1, 16, page_size=16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for backend in (
        SdpaAttention(shape),
        triton.TritonAttention(shape, max_num_reqs=1, device=device),
    ):
        assert get_cudagraph_support(backend.name) is backend.get_cudagraph_support()
