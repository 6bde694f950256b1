"""The operators of the simulated device against those of the CPU."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.npu
if os.environ.get("GRAPHRT_PLATFORM") != "ascend-sim":
    reason = "needs graphrt-ascend-sim and GRAPHRT_PLATFORM=ascend-sim (make test-ascend)"
    pytest.skip(reason, allow_module_level=True)

import graphrt_ascend_sim as simulator  # noqa: E402

simulator.start()

import torch_npu  # noqa: E402
from test_simulator import run  # noqa: E402

OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "arithmetic": lambda x, y: (x + 2 * y - x / (y + 3)) * x.neg() + (x - y) * 0.5,
    "functions": lambda x, y: x.exp() + y.sin() * x.cos() + x.abs().sqrt() + y.sigmoid() + x.tanh(),
    "activations": lambda x, y: F.silu(x) + x.relu() + F.gelu(y),
    "powers": lambda x, y: x.pow(2) + (x.abs() + 1).rsqrt() + 2**y,
    "in place": lambda x, y: x.clone().mul_(y).add_(1).sub_(y, alpha=2).div_(3).clamp_(-1, 1),
    "comparisons": lambda x, y: torch.where((x > y) & (x != 0) | (y <= 0.5), x, y),
    "masks": lambda x, y: x.masked_fill(y > 0, -7).tril(),
    "products": lambda x, y: x @ y.t() @ x + torch.addmm(x, x @ x.t(), y),
    "batches": lambda x, y: torch.bmm(x.view(2, 4, 8), y.view(2, 8, 4)).flatten(1),
    "linear": lambda x, y: F.linear(x, y, y[:, 0]),
    "softmax": lambda x, y: x.softmax(-1) + y.log_softmax(0),
    "reductions": lambda x, y: x.sum(1) + x.mean(1) + y.amax(1) + y.max(dim=1).values,
    "norm": lambda x, y: F.rms_norm(x, (8,), y[0], 1e-6)
    + F.layer_norm(x, (8,), y[0], y[1]),
    "positions": lambda x, y: x.argmax(1) + x.sort(dim=1).indices[:, 0] + x.topk(2).indices[:, 1],
    "gather": lambda x, y: x.index_select(0, torch.tensor([1, 0], device=x.device))
    + x.gather(0, torch.zeros(2, 8, dtype=torch.long, device=x.device)) + x[[2, 3]],
    "scatter": lambda x, y: x.clone()
    .index_copy_(0, torch.tensor([3, 1], device=x.device), y[:2])
    .index_put_((torch.tensor([0], device=x.device),), y[5])
    .scatter_(1, torch.full((8, 1), 2, device=x.device), y),
    "shapes": lambda x, y: torch.cat([x, torch.stack([y[0], y[1]]), x.t()[::2, :8].contiguous()]),
    "strides": lambda x, y: (x.t()[1::2] + y[:, 1:5].t()).transpose(0, 1),
    "masked": lambda x, y: x[y > 0].sum() + (y > 0).nonzero().sum(),
    "casts": lambda x, y: (x * 4).int().float() + (y > 0).to(x.dtype).float(),
    "ranges": lambda x, y: torch.arange(8, device=x.device) * x + torch.searchsorted(
        torch.arange(8.0, device=x.device), y.float(), right=True),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_simulated_operators_equal_cpu_operators(name: str, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randn(8, 8, generator=draw).to(dtype) for _ in range(2))
    found, expected = OPERATORS[name](x.npu(), y.npu()).cpu(), OPERATORS[name](x, y)
    assert found.dtype is expected.dtype and found.shape == expected.shape
    tolerance = 1e-5 if dtype is torch.float32 else 4e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_simulated_random_numbers_depend_only_on_the_seed() -> None:
    def draw() -> list[torch.Tensor]:
        torch.npu.manual_seed(5)
        x = torch.randn(64, device="npu")
        dropped = F.dropout(torch.ones(64, device="npu"), 0.5)
        return [x.cpu(), torch.rand(64, device="npu").cpu(), dropped.cpu(), x.uniform_().cpu()]

    first, second = draw(), draw()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[0].std() > 0.5 and 0 < (first[2] == 0).sum() < 64


@pytest.mark.parametrize("version", ["", "_v2"])
def test_simulated_paged_attention_equals_the_reference(version: str) -> None:
    draw = torch.Generator().manual_seed(2)
    lengths, heads, kv_heads, dim, page = [20, 68, 36], 4, 2, 128, 16
    query = torch.randn(3, heads, dim, generator=draw).half().float()
    cache = torch.randn(2, 16, page, kv_heads * dim, generator=draw).half().float()
    table = torch.randperm(15, generator=draw).view(3, 5).int()
    names = ("num_heads", "scale", "num_key_value_heads", "actual_seq_lengths")
    if version:
        names = ("num_query_heads", "softmax_scale", "num_key_value_heads", "actual_seq_qlen")
    options = dict(zip(names, (heads, 0.09, kv_heads, [1, 2, 3]), strict=True))
    options["actual_seq_kvlen" if version else "actual_seq_lengths_kv"] = lengths
    out, _ = getattr(torch_npu, f"npu_fused_infer_attention_score{version}")(
        query.half().npu(), *cache.half().npu(), input_layout="TND",
        block_table=table.npu(), block_size=page, **options,
    )  # fmt: skip
    for row, length in enumerate(lengths):
        pages = cache[:, table[row].long()].reshape(2, -1, kv_heads, dim)[:, :length]
        key, value = pages.repeat_interleave(heads // kv_heads, 2)
        scores = torch.einsum("hd,thd->ht", query[row], key) * 0.09
        expected = torch.einsum("ht,thd->hd", scores.softmax(-1), value)
        torch.testing.assert_close(out[row].cpu().float(), expected, rtol=2e-3, atol=2e-3)


HEADS, LATENT, ROPE, PAGE = 8, 512, 64, 16


def latent_call(lengths: list[int], tokens: int | None = None, **changed: Any) -> dict[str, Any]:
    """Arguments of npu_multi_head_latent_attention, of one token a request unless told."""
    draw = torch.Generator().manual_seed(3)

    def half(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).half().npu()

    rows, heads = tokens or len(lengths), changed.get("q_headnum", HEADS)
    return {
        "q_nope": half(rows, heads, LATENT),
        "q_rope": half(rows, heads, ROPE),
        "ctkv": half(8, PAGE, 1, LATENT),
        "k_rope": half(8, PAGE, 1, ROPE),
        "block_tables": torch.randint(0, 8, (len(lengths), 2), generator=draw).int().npu(),
        "context_lens": lengths,
        "q_headnum": heads,
        "qk_scale": 0.04,
        "kv_headnum": 1,
    } | changed


def attended(call: dict[str, Any], row: int, request: int, keys: int) -> tuple[torch.Tensor, ...]:
    """What one query gives over so many keys of a request, and the logarithm of its sum."""
    pages = call["block_tables"][request].cpu().long()
    latents, ropes = (call[name].cpu()[pages].flatten(0, 2)[:keys] for name in ("ctkv", "k_rope"))
    query, rope = (call[name][row].cpu().float() for name in ("q_nope", "q_rope"))
    scores = (query @ latents.float().t() + rope @ ropes.float().t()) * call["qk_scale"]
    return scores.softmax(-1) @ latents.float(), scores.logsumexp(-1)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu().float(), expected, rtol=2e-3, atol=2e-3)


def test_atb_paged_attention_equals_the_reference() -> None:
    call = latent_call([5, 18])
    query, cache, table = (call[name] for name in ("q_nope", "ctkv", "block_tables"))
    out = torch.empty(2, HEADS, LATENT, dtype=torch.float16, device="npu")
    lengths = torch.tensor([5, 18], dtype=torch.int32)
    torch_npu._npu_paged_attention(query, cache, cache, 1, HEADS, 0.04, table, lengths, out)
    call |= {"q_rope": torch.zeros_like(call["q_rope"])}
    for row, length in enumerate(lengths.tolist()):
        close(out[row], attended(call, row, row, length)[0])


def test_atb_latent_attention_equals_the_reference() -> None:
    call = latent_call([5, 18])
    out = torch_npu.atb.npu_multi_head_latent_attention(**call)
    for row, length in enumerate([5, 18]):
        close(out[row], attended(call, row, row, length)[0])


def test_latent_attention_writes_softmax_sums_only_under_calc_type_ring() -> None:
    call = latent_call([5, 18])
    out, lse = torch_npu.atb.npu_multi_head_latent_attention(
        **call, return_lse=True, calc_type="calc_type_ring"
    )
    assert lse.shape == (2, HEADS, 1) and lse.dtype is torch.float16
    for row, length in enumerate([5, 18]):
        expected, sums = attended(call, row, row, length)
        close(out[row], expected)
        close(lse[row, :, 0], sums)
    # One number, as is given where only the overload with a workspace will do, is left alone.
    single = torch.full((1,), 7.0, dtype=torch.float16, device="npu")
    again = torch.empty_like(out)
    torch_npu.atb.npu_multi_head_latent_attention(**call, return_lse=True, output=again, lse=single)
    assert torch.equal(again.cpu(), out.cpu()) and single.item() == 7


@pytest.mark.parametrize(
    ("options", "rows", "said"),
    [
        ({}, 2, "lse is written with calc_type_ring only"),
        ({"calc_type": "calc_type_ring"}, 1, "calc_type_ring writes lse"),
    ],
)
def test_latent_attention_refuses_unwritten_or_missing_softmax_sum_outputs(
    monkeypatch: pytest.MonkeyPatch, options: Any, rows: int, said: str
) -> None:
    # Else torch_npu's queue of launches, and with it the process, would end.
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "0")
    code = f"""
from test_simulator_operators import *
heads = HEADS if {rows} > 1 else 1
lse = torch.empty({rows}, heads, 1).half().npu()
out = torch.empty(2, HEADS, LATENT).half().npu()
try:
    torch_npu.atb.npu_multi_head_latent_attention(
        **latent_call([5, 18]), return_lse=True, lse=lse, output=out, **{options}
    )
except RuntimeError:
    print(recent_error())
print("done")
os._exit(0)
"""
    assert said in run(code)


def recent_error() -> str:
    """What aclGetRecentErrMsg() says, which the errors of ATB's calls leave out."""
    ask = ctypes.CDLL("libascendcl.so").aclGetRecentErrMsg
    ask.restype = ctypes.c_char_p
    found: bytes = ask()
    return found.decode()


@pytest.mark.parametrize("heads", [8, 128])
def test_speculative_latent_attention_with_query_lengths_equals_the_reference(heads: int) -> None:
    queries, keys = [2, 1, 3], [4, 9, 20]
    call = latent_call(keys, sum(queries), q_headnum=heads)
    spec = {"qseqlen": queries, "calc_type": "calc_type_spec"}
    out = torch_npu.atb.npu_multi_head_latent_attention(**call, **spec)
    row = 0
    for request, (count, length) in enumerate(zip(queries, keys, strict=True)):
        for query in range(count):
            # Of all sizes only that of 128 heads hides later keys without a mask.
            seen = length - count + query + 1 if heads == 128 else length
            close(out[row], attended(call, row, request, seen)[0])
            row += 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"q_headnum": 4}, "8, 16, 32, 64 or 128 heads"),
        ({"qk_scale": 1.5}, "qk_scale"),
        ({"ctkv": (8, PAGE, 1, 256)}, "512 wide"),
        ({"ctkv": (8, 144, 1, LATENT), "k_rope": (8, 144, 1, ROPE)}, "at most 128 tokens"),
        ({"context_lens": [5, 18, 1]}, "another number of requests"),
        ({"context_lens": [0, 18]}, "rows the device would move"),
        ({"context_lens": [5, 33]}, "not between 0 and 32"),
        ({"qseqlen": [1, 1]}, "read with calc_type_spec only"),
        ({"calc_type": "calc_type_spec"}, "read with calc_type_spec only"),
        ({"calc_type": "calc_type_spec", "qseqlen": [2, 1]}, "does not fit the queries"),
        ({"mask": (32, 32)}, "lacks masks"),
    ],
)
def test_arguments_that_atb_refuses_or_ignores_raise(wrong: Any, said: str) -> None:
    for name, value in wrong.items():
        if isinstance(value, tuple):
            wrong |= {name: torch.zeros(value, dtype=torch.float16, device="npu")}
    ask = torch_npu.atb._npu_multi_head_latent_attention_get_workspace
    with pytest.raises(RuntimeError, match="GetWorkspaceSize failed"):
        ask(**latent_call([5, 18]) | wrong, return_lse=False)
    assert said in recent_error()


@pytest.mark.parametrize(
    ("page", "lengths", "said"),
    [
        (4, [5, 6], "none that ATB takes"),
        (144, [5, 6], "none that ATB takes"),
        (16, [0, 6], "rows the device would move"),
        (16, [5], "2 tokens, more than"),
    ],
)
def test_atb_paged_attention_refuses_lengths_that_would_move_rows(
    page: int, lengths: Any, said: str
) -> None:
    query, cache = (torch.zeros(n, page, 1, 512).half().npu() for n in (2, 8))
    table = torch.zeros(2, 2, dtype=torch.int32).npu()
    out = torch.zeros(2, 1, 512).half().npu()
    keys = torch.tensor(lengths, dtype=torch.int32)
    ask = torch_npu._npu_paged_attention_get_workspace
    with pytest.raises(RuntimeError):
        ask(query[:, 0], cache, cache, 1, 1, 0.1, table, keys, out)
    assert said in recent_error()


def test_latent_attention_leaves_trailing_requests_without_keys_unwritten() -> None:
    call = latent_call([5, 0])
    out = torch.full((2, HEADS, LATENT), 3.0).half().npu()
    torch_npu.atb.npu_multi_head_latent_attention(**call, output=out)
    close(out[0], attended(call, 0, 0, 5)[0])
    assert (out[1] == 3).all().item()
