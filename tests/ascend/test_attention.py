"""The ready-made tasks: torch_npu's argument names, padding, and the updates that hosts build."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphrt import BatchDescriptor, UpdatableTask, forward_context
from graphrt.ascend import attention
from graphrt.ascend.attention import operators
from graphrt.core.base.errors import InvalidInputError, InvalidOptionError, InvalidUpdateError

DECODE = BatchDescriptor(4, 4, uniform=True, query_len=1)
LENGTHS = [5, 6]


class Recorder:
    """Stands for torch_npu, and notes what each of its operators was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        recorder = self

        class Operator:
            def __call__(self, *args: Any, **kwargs: Any) -> None:
                recorder.calls.append((name, args, kwargs))

            @property
            def out(self) -> Any:
                return self

        return recorder if name == "atb" else Operator()


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(operators, "torch_npu", lambda: recorder)
    return recorder


def call(task: Any, updates: Any, *args: Any, descriptor: Any = DECODE, **kwargs: Any) -> None:
    with forward_context("NONE", descriptor, updates={"attention": updates}):
        task(*args, **kwargs)


def test_fused_infer_attention_issues_padded_query_and_key_lengths(npu):
    task = attention.fused_infer_attention(max_kv_len=64)
    updates = {"actual_seq_lengths": [1, 2], "actual_seq_lengths_kv": LENGTHS}
    call(task, updates, "q", "k", "v", input_layout="TND", out=["o", "lse"])
    assert npu.calls == [
        (
            "npu_fused_infer_attention_score",
            ("q", "k", "v"),
            {
                "input_layout": "TND",
                "out": ["o", "lse"],
                "actual_seq_lengths": [1, 2, 3, 4],
                "actual_seq_lengths_kv": [5, 6, 0, 0],
            },
        )
    ]


def test_fused_infer_attention_v2_issues_lengths_under_its_own_names(npu):
    task = attention.fused_infer_attention_v2(max_kv_len=64)
    updates = {"actual_seq_qlen": [1, 2], "actual_seq_kvlen": LENGTHS}
    call(task, updates, "q", "k", "v", out=["o", "lse"])
    ((name, _, kwargs),) = npu.calls
    assert name == "npu_fused_infer_attention_score_v2"
    assert kwargs["actual_seq_qlen"] == [1, 2, 3, 4]
    assert kwargs["actual_seq_kvlen"] == [5, 6, 0, 0]


def test_the_bnsd_layout_of_fused_infer_attention_refuses_query_lengths(npu):
    task = attention.fused_infer_attention(max_kv_len=64, layout="BNSD")
    call(task, {"actual_seq_lengths_kv": LENGTHS}, "q", "k", "v", out=[])
    assert "actual_seq_lengths" not in npu.calls[0][2]
    with pytest.raises(InvalidUpdateError, match="actual_seq_lengths"):
        call(task, {"actual_seq_lengths_kv": LENGTHS, "actual_seq_lengths": [1, 2]})


def test_paged_attention_gets_its_lengths_as_a_tensor_on_the_host(npu):
    task = attention.paged_attention(max_kv_len=64)
    names = ("query", "key_cache", "value_cache", "num_kv_heads", "num_heads", "scale_value")
    arguments = {name: name for name in (*names, "block_table")}
    call(task, {"context_lens": LENGTHS}, **arguments, out="out", workspace="workspace")
    ((name, args, kwargs),) = npu.calls
    assert name == "_npu_paged_attention"
    assert args[:7] == (*names, "block_table") and args[8] == "out"
    assert args[7].dtype == torch.int32 and args[7].tolist() == [5, 6, 0, 0]
    assert kwargs == {"workspace": "workspace"}


@pytest.mark.parametrize("query_lens", [False, True])
def test_mla_attention_issues_context_lengths_and_query_lengths_on_request(npu, query_lens):
    task = attention.mla_attention(max_kv_len=64, query_lens=query_lens)
    updates = {"context_lens": LENGTHS, **({"qseqlen": [1, 1]} if query_lens else {})}
    arguments = ("q_nope", "q_rope", "ctkv", "k_rope", "block_tables", 8, 1.0, 1)
    call(task, updates, *arguments, output="out")
    ((name, args, kwargs),) = npu.calls
    assert name == "npu_multi_head_latent_attention"
    assert args == (*arguments[:5], [5, 6, 0, 0], *arguments[5:])
    assert kwargs.pop("output") == "out"
    spec = {"qseqlen": [1, 1, 1, 1], "calc_type": "calc_type_spec"}
    assert kwargs == (spec if query_lens else {})


@pytest.mark.parametrize(
    ("query_lens", "options", "wrong"),
    [
        (True, {"calc_type": "calc_type_ring"}, "'qseqlen' would be ignored"),
        (False, {"lse": "lse"}, "'lse' would be ignored"),
        (True, {"lse": "lse"}, "'lse' would be ignored"),
    ],
)
def test_latent_attention_refuses_options_the_operator_would_ignore(
    npu, query_lens, options, wrong
):
    task = attention.mla_attention(max_kv_len=64, query_lens=query_lens)
    updates = {"context_lens": LENGTHS, **({"qseqlen": [1, 1]} if query_lens else {})}
    with pytest.raises(InvalidInputError, match=wrong):
        call(task, updates, *range(5), 8, 1.0, 1, output="out", **options)
    assert npu.calls == []


@pytest.mark.parametrize("make", [attention.paged_attention, attention.mla_attention])
def test_a_live_request_with_zero_keys_is_refused(npu, make):
    with pytest.raises(InvalidUpdateError, match=r"(?s)context_lens.*out of its bounds.*from 1"):
        call(make(max_kv_len=64), {"context_lens": [5, 0, 6]}, *range(8), out="o", output="o")
    assert npu.calls == []


def test_lengths_at_capture_are_the_worst_case_of_the_graph():
    task = attention.fused_infer_attention(max_kv_len=64)
    assert task.at_capture is not None
    updates = task.at_capture(BatchDescriptor(8, 4, uniform=True, query_len=2))
    assert updates == {"actual_seq_lengths": [2, 4, 6, 8], "actual_seq_lengths_kv": [64] * 4}
    updates = task.at_capture(BatchDescriptor(8))
    assert updates == {"actual_seq_lengths": [8], "actual_seq_lengths_kv": [64]}


@pytest.mark.parametrize(
    ("descriptor", "queries"),
    [
        (BatchDescriptor(8, 4, uniform=True, query_len=2), [2, 2, 2, 2]),
        (BatchDescriptor(8, uniform=True, query_len=2), [2, 2, 2, 2]),
        (BatchDescriptor(5, 2), [2, 3]),
        (BatchDescriptor(8), [8]),
    ],
)
def test_query_lengths_at_capture_add_up_to_the_graphs_tokens(npu, descriptor, queries):
    task = attention.mla_attention(max_kv_len=64, query_lens=True)
    assert task.at_capture is not None
    worst = task.at_capture(descriptor)
    assert worst == {"context_lens": [64] * len(queries), "qseqlen": queries}
    call(task, worst, *range(5), 8, 1.0, 1, output="out", descriptor=descriptor)
    assert npu.calls[0][2]["qseqlen"] == queries


def test_padding_tokens_of_a_mixed_batch_need_a_spare_request(npu):
    mixed = BatchDescriptor(8, 4)
    updates = {"actual_seq_lengths": [1, 2, 3, 6], "actual_seq_lengths_kv": [9] * 4}
    with pytest.raises(InvalidUpdateError, match=r"reqs\+1"):
        call(attention.fused_infer_attention(max_kv_len=64), updates, descriptor=mixed)
    task = attention.fused_infer_attention(max_kv_len=64, spare_request=True)
    call(task, updates, descriptor=mixed)
    assert npu.calls[0][2]["actual_seq_lengths"] == [1, 2, 3, 6, 8]
    assert npu.calls[0][2]["actual_seq_lengths_kv"] == [9, 9, 9, 9, 0]


def test_update_attn_params_reads_lengths_from_each_layers_metadata():
    task = attention.fused_infer_attention(max_kv_len=64)
    shared = SimpleNamespace(seq_lens_list=[3, 4], actual_seq_lengths_q=[1, 2])
    own = SimpleNamespace(seq_lens=torch.tensor([7]), query_start_loc_list=[1])
    updates = attention.update_attn_params(task, {"a": shared, "b": shared, "c": own})
    assert updates["a"] == {"actual_seq_lengths_kv": [3, 4], "actual_seq_lengths": [1, 2]}
    assert updates["b"] is updates["a"]
    assert updates["c"] == {"actual_seq_lengths_kv": [7], "actual_seq_lengths": [1]}
    paged = attention.paged_attention(max_kv_len=64)
    assert attention.update_attn_params(paged, {"c": own}) == {"c": {"context_lens": [7]}}


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_update_attn_params_reads_the_lengths_of_one_rank_of_context_parallelism(kind):
    task = attention.fused_infer_attention(max_kv_len=64)

    def metadata(**lengths):
        decode = SimpleNamespace(**lengths)
        return {"a": SimpleNamespace(seq_lens_list=[9, 5], actual_seq_lengths_q=[1, 2],
                                     decode_meta=decode)}  # fmt: skip

    of_dcp = metadata(num_computed_tokens_of_dcp=kind([[5, 4], [3, 2]]))
    updates = attention.update_attn_params(task, of_dcp, cp_rank=(1,))
    assert updates == {"a": {"actual_seq_lengths_kv": [4, 2], "actual_seq_lengths": [1, 2]}}
    of_both = metadata(num_computed_tokens_of_pcp_dcp=kind([[[3, 2], [2, 2]], [[2, 1], [1, 1]]]))
    updates = attention.update_attn_params(task, of_both, cp_rank=(0, 1))
    assert updates["a"]["actual_seq_lengths_kv"] == [2, 1]
    for wrong in (None, (0,)):
        with pytest.raises(InvalidUpdateError, match="a tuple of 2"):
            attention.update_attn_params(task, of_both, cp_rank=wrong)
    no_decodes = metadata(num_computed_tokens_of_dcp=None)
    updates = attention.update_attn_params(task, no_decodes, cp_rank=(1,))
    assert updates["a"]["actual_seq_lengths_kv"] == [9, 5]


@pytest.mark.parametrize("wrong", [0, "0", (-1,), (2,), (True,), ("a",), (1.0,), (0, 0)])
def test_a_cp_rank_that_the_metadata_does_not_have_is_refused(wrong):
    """The last rank's lengths for -1 would be right for no other rank."""
    task = attention.fused_infer_attention(max_kv_len=64)
    lengths = SimpleNamespace(num_computed_tokens_of_dcp=torch.tensor([[5, 4], [3, 2]]))
    metadata = {"a": SimpleNamespace(decode_meta=lengths, actual_seq_lengths_q=[1, 2])}
    with pytest.raises(InvalidUpdateError, match="rank"):
        attention.update_attn_params(task, metadata, cp_rank=wrong)


@pytest.mark.parametrize("update", ["update_attn_params", "update_mla_attn_params"])
def test_updates_of_what_is_no_task_or_no_metadata_by_layer_are_refused(update):
    update = getattr(attention, update)
    task = attention.fused_infer_attention(max_kv_len=64)
    layer = SimpleNamespace(seq_lens_list=[3, 4], actual_seq_lengths_q=[1, 2])
    for wrong in ([layer], None, layer):
        with pytest.raises(InvalidOptionError, match="'attn_metadata'"):
            update(task, wrong)
    for wrong in (3, UpdatableTask("attention", print, {})):
        with pytest.raises(InvalidOptionError, match="'task'"):
            update(wrong, {"a": layer})
    for wrong in (None, SimpleNamespace()):
        with pytest.raises(InvalidUpdateError, match="seq_lens_list"):
            update(task, {"a": wrong})


@pytest.mark.parametrize("wrong", [0, -1, "2", 1.5, True])
def test_update_mla_attn_params_refuses_a_query_length_that_is_no_count(wrong):
    task = attention.mla_attention(max_kv_len=64, query_lens=True)
    with pytest.raises(InvalidUpdateError, match="query_len=1"):
        attention.update_mla_attn_params(task, {}, query_len=wrong)


@pytest.mark.parametrize(
    "make", [attention.fused_infer_attention, attention.fused_infer_attention_v2]
)
def test_a_layout_with_tokens_has_query_lengths_and_one_that_is_none_is_refused(make):
    for layout in ("TND", "NTD", "NTD_TND", "TND_NTD"):
        assert make(max_kv_len=64, layout=layout).adds_up
    for layout in ("BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_NBSD"):
        assert make(max_kv_len=64, layout=layout).queries is None
    for wrong in ("tnd", "xyz", "", 3, None):
        with pytest.raises(InvalidOptionError, match='layout="TND"'):
            make(max_kv_len=64, layout=wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"max_kv_len": each} for each in (None, 0, -1, True, "512", 512.0)),
        *({"least_kv_len": each} for each in (None, -1, True, "1")),
        *({name: 1} for name in ("spare_request", "cumulative", "queries")),
    ],
    ids=str,
)
def test_an_attention_task_of_wrong_arguments_is_refused_by_their_names(wrong):
    with pytest.raises(InvalidOptionError, match=next(iter(wrong))):
        attention.attention_task("attention", print, **{"keys": "k", "max_kv_len": 5, **wrong})


def test_update_mla_attn_params_reads_the_lengths_of_this_rank_of_context_parallelism():
    task = attention.fused_infer_attention(max_kv_len=64)
    decode = SimpleNamespace(
        cp_seq_len=torch.tensor([4, 2]), seq_lens_list=[9, 5], actual_seq_lengths_q=[1, 2]
    )
    metadata = {"a": SimpleNamespace(decode=decode)}
    updates = attention.update_mla_attn_params(task, metadata)
    assert updates == {"a": {"actual_seq_lengths_kv": [4, 2], "actual_seq_lengths": [1, 2]}}
    updates = attention.update_mla_attn_params(task, metadata, query_len=2)
    assert updates == {"a": {"actual_seq_lengths_kv": [4, 2], "actual_seq_lengths": [2, 4]}}
    decode.cp_seq_len = None
    updates = attention.update_mla_attn_params(task, metadata)
    assert updates["a"]["actual_seq_lengths_kv"] == [9, 5]


def test_update_mla_attn_params_reads_decode_lengths_and_refuses_device_tensors():
    task = attention.fused_infer_attention(max_kv_len=64)
    decode = SimpleNamespace(seq_lens_list=[3, 4], actual_seq_lengths_q=[1, 2])
    metadata = {"a": SimpleNamespace(decode=decode)}
    updates = attention.update_mla_attn_params(task, metadata)
    assert updates == {"a": {"actual_seq_lengths_kv": [3, 4], "actual_seq_lengths": [1, 2]}}
    updates = attention.update_mla_attn_params(task, metadata, query_len=3)
    assert updates == {"a": {"actual_seq_lengths_kv": [3, 4], "actual_seq_lengths": [3, 6]}}
    # ATB's query lengths do not add up.
    task = attention.mla_attention(max_kv_len=64, query_lens=True)
    updates = attention.update_mla_attn_params(task, metadata, query_len=3)
    assert updates == {"a": {"context_lens": [3, 4], "qseqlen": [3, 3]}}
    decode.actual_seq_lengths_q = [2, 5]
    updates = attention.update_mla_attn_params(task, metadata)
    assert updates == {"a": {"context_lens": [3, 4], "qseqlen": [2, 3]}}
    decode.actual_seq_lengths_q = torch.empty(2, device="meta")
    with pytest.raises(InvalidUpdateError, match=r"'qseqlen' are on the device"):
        attention.update_mla_attn_params(task, metadata)


def test_attention_metadata_without_host_lengths_is_refused():
    task = attention.fused_infer_attention(max_kv_len=64)
    with pytest.raises(InvalidUpdateError, match="seq_lens_list"):
        attention.update_attn_params(task, {"a": SimpleNamespace()})
    on_device = SimpleNamespace(seq_lens=torch.empty(2, device="meta"), actual_seq_lengths_q=[1])
    with pytest.raises(InvalidUpdateError, match="on the device"):
        attention.update_attn_params(task, {"a": on_device})
