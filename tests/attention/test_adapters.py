"""What of the adapters runs without their libraries: arguments, errors, the order of calls.

Nothing here says that the libraries do what the adapters expect of them.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphrt.attention import (
    AttentionShape,
    AttentionStep,
    FlashAttention,
    FlashAttention3,
    FlashInferAttention,
    GroupedShape,
    LatentShape,
    reference_attention,
)
from graphrt.attention.libraries.flash import copy_live, key_starts
from graphrt.attention.libraries.flashinfer.backend import worst_case
from graphrt.attention.libraries.flashinfer.pages import page_lists, starts
from graphrt.attention.prefill.varlen import varlen_attention
from graphrt.core.base.errors import InvalidInputError, UnsupportedHostError
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import AttentionSupport
from tests.attention.problems import random_problem

GROUPED = GroupedShape(4, 2, 16, page_size=16)
LARGE_PAGES = GroupedShape(4, 2, 16, page_size=256)
LATENT = LatentShape(4, 32, 16, page_size=16, scale=0.2)
DECODE = BatchDescriptor(4, 4, uniform=True)


@pytest.mark.parametrize(
    ("make", "module"),
    [
        (lambda: FlashAttention(LARGE_PAGES), "flash_attn"),
        (lambda: FlashAttention3(LATENT), "flash_attn_interface"),
        (lambda: new_flashinfer(GROUPED), "flashinfer"),
    ],
)
def test_a_missing_attention_library_is_named_by_the_error(
    make: Any, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnsupportedHostError, match="SdpaAttention") as caught:
        make()
    assert repr(module) in str(caught.value.expected)


def test_a_library_that_fails_to_import_is_named_with_its_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "flash_attn.py").write_text("raise OSError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    with pytest.raises(UnsupportedHostError, match="cannot be imported") as caught:
        FlashAttention(LARGE_PAGES)
    assert "undefined symbol" in str(caught.value)


def test_flash_2_refuses_small_pages_and_latent_shapes() -> None:
    with pytest.raises(InvalidInputError, match="multiple of 256"):
        FlashAttention(GROUPED)
    with pytest.raises(InvalidInputError, match="FlashAttention3"):
        FlashAttention(LATENT)  # type: ignore[arg-type]


def test_output_rows_after_the_last_request_are_zeros() -> None:
    output, out = torch.full((5, 1, 2), float("nan")), torch.ones(5, 1, 2)
    output[:3] = 7.0
    copy_live(out, output, torch.tensor([0, 2, 3], dtype=torch.int32))
    assert out[:, 0, 0].tolist() == [7, 7, 7, 0, 0]
    assert key_starts(torch.tensor([4, 0, 2], dtype=torch.int32)).tolist() == [0, 4, 4, 6]


def recording_flash(calls: list[tuple[str, dict[str, Any]]]) -> SimpleNamespace:
    """A stand-in that notes its arguments and returns something of the right shape."""

    def note(name: str) -> Any:
        def call(q: torch.Tensor, k: Any = None, v: Any = None, **keywords: Any) -> torch.Tensor:
            calls.append((name, {"q": q, **keywords}))
            width = keywords["v_cache"] if v is None else v
            return q.new_zeros(*q.shape[:-1], width.shape[-1])

        return call

    names = ("flash_attn_with_kvcache", "flash_attn_varlen_func")
    return SimpleNamespace(**{name: note(name) for name in names})


def test_flash_2_gets_int32_tables_and_bounds_from_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setitem(sys.modules, "flash_attn", recording_flash(calls))
    backend = FlashAttention(LARGE_PAGES, num_splits=4)
    assert backend.get_cudagraph_support() is AttentionSupport.UNIFORM_BATCH
    uniform = random_problem(LARGE_PAGES, [300, 5], 2, table_dtype=torch.int64)
    backend.attend(uniform.step, uniform.query, *uniform.caches)
    mixed = random_problem(LARGE_PAGES, [300, 5], query_lens=[6, 1], padding_tokens=1)
    backend.attend(mixed.step, mixed.query, *mixed.caches)
    (first, decode), (second, prefill) = calls
    assert (first, second) == ("flash_attn_with_kvcache", "flash_attn_varlen_func")
    assert decode["q"].shape == (2, 2, 4, 16) and decode["num_splits"] == 4
    assert decode["block_table"].dtype is torch.int32
    assert prefill["max_seqlen_q"] == 8 and prefill["max_seqlen_k"] == mixed.step.max_context
    assert prefill["cu_seqlens_k"].tolist() == [0, 300, 305]


def test_flash_3_gets_latent_queries_and_caches_in_two_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setitem(sys.modules, "flash_attn_interface", recording_flash(calls))
    backend = FlashAttention3(LATENT)
    assert backend.get_cudagraph_support() is AttentionSupport.ALWAYS
    problem = random_problem(LATENT, [20, 5], query_lens=[3, 1])
    output = backend.attend(problem.step, problem.query, *problem.caches)
    ((_, keywords),) = calls
    assert output.shape == (4, 4, 32)
    assert keywords["q"].shape == (4, 4, 16) and keywords["qv"].shape == (4, 4, 32)
    assert keywords["k_cache"].shape[1:] == (16, 1, 16) and keywords["v_cache"].shape[1:] == (
        16,
        1,
        32,
    )
    assert keywords["k_cache"].untyped_storage().data_ptr() == problem.caches[0].data_ptr()
    assert keywords["max_seqlen_q"] == 4


@given(st.lists(st.integers(0, 100), min_size=1, max_size=8), st.sampled_from([1, 16, 64]))
def test_page_lists_hold_every_page_once_and_in_order(lengths: list[int], page_size: int) -> None:
    columns = max(1, max(-(-length // page_size) for length in lengths)) + 1
    table = torch.arange(len(lengths) * columns).view(-1, columns) + 100
    lists = page_lists(lengths, page_size, columns)
    pages, total = lists.indices(table).tolist(), 0
    for row, length in enumerate(lengths):
        begin, end = lists.indptr[row : row + 2].tolist()
        seen = max(1, length)
        assert pages[begin:end] == table[row, : -(-seen // page_size)].tolist()
        assert (end - begin - 1) * page_size + int(lists.last_page_len[row]) == seen
        assert 1 <= int(lists.last_page_len[row]) <= page_size
        assert int(lists.key_lens[row]) == seen
        total += end - begin
    assert total == len(pages)


def test_a_context_longer_than_the_block_table_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="33 tokens"):
        page_lists([3, 33], 16, 2)


def test_the_worst_case_has_all_tokens_and_the_longest_contexts_for_planning() -> None:
    lengths = worst_case(7, 3, 64)
    assert lengths.context_lens == (64, 64, 64) and lengths.query_lens == (3, 2, 2)
    assert starts(torch.tensor(lengths.query_lens, dtype=torch.int32)).tolist() == [0, 3, 5, 7]


class RecordingWrapper:
    """Attends to what `plan` was given, and keeps the buffers it was made with."""

    def __init__(self, kind: str, shape: AttentionShape, keywords: dict[str, Any]) -> None:
        self.kind, self.shape, self.given = kind, shape, keywords
        self.plans = 0

    def plan(self, *lists: Any, **options: Any) -> None:
        self.plans += 1
        if isinstance(self.shape, LatentShape):
            queries, indptr, pages, lengths = lists[:4]
        else:
            queries = None if self.kind == "decode" else lists[0]
            indptr, pages, last = lists[-7:-4] if queries is None else lists[1:4]
            lengths = (indptr.diff() - 1) * self.shape.page_size + last
            assert options["sm_scale"] == self.shape.softmax_scale
        reqs = len(indptr) - 1
        self.queries = torch.arange(reqs + 1) if queries is None else queries
        self.lengths = lengths
        for tensor in (self.queries, indptr, lengths):
            assert tensor.device.type == "cpu"
        self.table = torch.zeros(reqs, int(indptr.diff().max()), dtype=torch.int32)
        for row, (begin, end) in enumerate(pairwise(indptr.tolist())):
            self.table[row, : end - begin] = pages[begin:end]

    def run(self, *operands: Any, out: torch.Tensor) -> None:
        query, caches = operands[0], operands[1]
        if isinstance(self.shape, LatentShape):
            query = torch.cat(operands[:2], -1)
            caches = (torch.cat(operands[2:], -1),)
        context = self.table.shape[1] * self.shape.page_size
        step = AttentionStep(self.table, self.lengths, None, self.queries.to(torch.int32), context)
        varlen_attention(self.shape, step, query, caches, out)


def stand_in(made: list[RecordingWrapper]) -> SimpleNamespace:
    def maker(kind: str, shape: AttentionShape) -> Any:
        def make(workspace: torch.Tensor, *layout: str, **keywords: Any) -> RecordingWrapper:
            assert not workspace.any()
            chosen = "decode" if keywords.get("use_cuda_graph") else kind
            made.append(RecordingWrapper(chosen, shape, keywords))
            return made[-1]

        return make

    return SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=maker("decode", GROUPED),
        BatchPrefillWithPagedKVCacheWrapper=maker("eager", GROUPED),
        mla=SimpleNamespace(BatchMLAPagedAttentionWrapper=maker("eager", LATENT)),
    )


def new_flashinfer(shape: AttentionShape) -> FlashInferAttention:
    return FlashInferAttention(
        shape,
        max_reqs=8,
        max_blocks=6,
        dtype=torch.float32,
        device="cpu",
        workspace_bytes=64,
    )


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[RecordingWrapper]:
    wrappers: list[RecordingWrapper] = []
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in(wrappers))
    return wrappers


@pytest.mark.parametrize("shape", [GROUPED, LATENT])
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("captured", [True, False])
def test_flashinfer_decodes_with_the_planned_lengths(
    shape: AttentionShape, told: bool, captured: bool, made: list[RecordingWrapper]
) -> None:
    backend = new_flashinfer(shape)
    problem = random_problem(shape, [40, 3, 0, 0], 1, max_blocks=6)
    step = problem.step
    buffers = {"block_table": step.block_table, "context_lens": step.context_lens}
    if captured:
        backend.build(buffers, DECODE, "capture")
    if told:
        backend.lengths([40, 3])
    backend.build(buffers, DECODE, "replay")
    assert [wrapper.kind for wrapper in made] == ["eager", "decode"][: 1 + captured]
    output = backend.attend(step, problem.query, *problem.caches, out=problem.out)
    expected = reference_attention(shape, step, problem.query, *problem.caches)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    assert backend.device_reads == (not told)


@pytest.mark.parametrize("shape", [GROUPED, LATENT])
@pytest.mark.parametrize("told", [True, False])
def test_flashinfer_runs_mixed_batches_eagerly(
    shape: AttentionShape, told: bool, made: list[RecordingWrapper]
) -> None:
    backend = new_flashinfer(shape)
    contexts, queries = [40, 9, 0, 0], [5, 1, 0, 0]
    problem = random_problem(shape, contexts, query_lens=queries, max_blocks=6, padding_tokens=2)
    step = problem.step
    assert step.query_start_loc is not None
    buffers = {
        "block_table": step.block_table,
        "context_lens": step.context_lens,
        "query_start_loc": step.query_start_loc,
    }
    if told:
        backend.lengths([40, 9], [5, 1])
    backend.build(buffers, BatchDescriptor(8), "replay")
    out = torch.zeros_like(problem.out)
    output = backend.attend(step, problem.query, *problem.caches, out=out)
    expected = reference_attention(shape, step, problem.query, *problem.caches)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    assert [wrapper.plans for wrapper in made] == [1]


@pytest.mark.parametrize("shape", [GROUPED, LATENT])
def test_flashinfer_plans_every_phase_into_the_same_buffers(
    shape: AttentionShape, made: list[RecordingWrapper]
) -> None:
    backend = new_flashinfer(shape)
    problem = random_problem(shape, [0] * 4, 1, max_blocks=6)
    small = random_problem(shape, [0] * 2, 1, max_blocks=6)
    for found, descriptor in (
        (problem, DECODE),
        (small, BatchDescriptor(2, 2, uniform=True)),
        (problem, DECODE),
    ):
        buffers = {
            "block_table": found.step.block_table,
            "context_lens": found.step.context_lens,
        }
        for phase in ("warmup", "capture", "replay"):
            backend.lengths([1])
            backend.build(buffers, descriptor, phase)  # type: ignore[arg-type]
    _, four, two = made
    assert (four.plans, two.plans) == (6, 3)
    assert backend.device_reads == 0
    for name, buffer in four.given.items():
        if isinstance(buffer, torch.Tensor):
            assert buffer.data_ptr() == two.given[name].data_ptr()
    assert len(four.given["kv_indices" if shape is LATENT else "paged_kv_indices_buffer"]) == 48


def test_flashinfer_plans_a_capture_for_the_longest_contexts(made: list[RecordingWrapper]) -> None:
    backend = new_flashinfer(GROUPED)
    problem = random_problem(GROUPED, [0] * 4, 1, max_blocks=6)
    buffers = {"block_table": problem.step.block_table, "context_lens": problem.step.context_lens}
    backend.build(buffers, DECODE, "capture")
    assert made[-1].lengths.tolist() == [96] * 4


def test_flashinfer_declares_one_token_a_request(made: list[RecordingWrapper]) -> None:
    single = AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert new_flashinfer(GROUPED).get_cudagraph_support() is single
    assert new_flashinfer(LATENT).get_cudagraph_support() is single


def test_flashinfer_refuses_lengths_of_another_step(made: list[RecordingWrapper]) -> None:
    backend = new_flashinfer(GROUPED)
    problem = random_problem(GROUPED, [3] * 4, 1, max_blocks=6)
    buffers = {"block_table": problem.step.block_table, "context_lens": problem.step.context_lens}
    backend.lengths([3] * 5)
    with pytest.raises(InvalidInputError, match="another step"):
        backend.build(buffers, DECODE, "replay")
    with pytest.raises(InvalidInputError, match="2 context lengths, 1 query"):
        backend.lengths([3, 4], [1])
