"""The operators of the simulated device against those of the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable

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
def test_operators_compute_what_the_cpu_computes(name: str, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randn(8, 8, generator=draw).to(dtype) for _ in range(2))
    found, expected = OPERATORS[name](x.npu(), y.npu()).cpu(), OPERATORS[name](x, y)
    assert found.dtype is expected.dtype and found.shape == expected.shape
    tolerance = 1e-5 if dtype is torch.float32 else 4e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_random_numbers_depend_on_the_seed_alone() -> None:
    def draw() -> list[torch.Tensor]:
        torch.npu.manual_seed(5)
        x = torch.randn(64, device="npu")
        dropped = F.dropout(torch.ones(64, device="npu"), 0.5)
        return [x.cpu(), torch.rand(64, device="npu").cpu(), dropped.cpu(), x.uniform_().cpu()]

    first, second = draw(), draw()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[0].std() > 0.5 and 0 < (first[2] == 0).sum() < 64


@pytest.mark.parametrize("version", ["", "_v2"])
def test_paged_attention_reads_its_pages(version: str) -> None:
    draw = torch.Generator().manual_seed(2)
    lengths, heads, kv_heads, dim, page = [5, 17, 9], 4, 2, 8, 4
    query = torch.randn(3, heads, dim, generator=draw)
    cache = torch.randn(2, 16, page, kv_heads * dim, generator=draw)
    table = torch.randperm(15, generator=draw).view(3, 5).int()
    names = ("num_heads", "scale", "num_key_value_heads", "actual_seq_lengths")
    if version:
        names = ("num_query_heads", "softmax_scale", "num_key_value_heads", "actual_seq_qlen")
    options = dict(zip(names, (heads, 0.3, kv_heads, [1, 2, 3]), strict=True))
    options["actual_seq_kvlen" if version else "actual_seq_lengths_kv"] = lengths
    out, _ = getattr(torch_npu, f"npu_fused_infer_attention_score{version}")(
        query.npu(), cache[0].npu(), cache[1].npu(), input_layout="TND",
        block_table=table.npu(), block_size=page, **options,
    )  # fmt: skip
    for row, length in enumerate(lengths):
        pages = cache[:, table[row].long()].reshape(2, -1, kv_heads, dim)[:, :length]
        key, value = pages.repeat_interleave(heads // kv_heads, 2)
        scores = torch.einsum("hd,thd->ht", query[row], key) * 0.3
        expected = torch.einsum("ht,thd->hd", scores.softmax(-1), value)
        torch.testing.assert_close(out[row].cpu(), expected, rtol=1e-5, atol=1e-5)


def test_atb_attends_to_pages_and_to_latents() -> None:
    draw = torch.Generator().manual_seed(3)
    lengths, heads, dim, rope, page = [5, 8], 4, 16, 8, 4
    query, query_rope = (torch.randn(2, heads, size, generator=draw).half() for size in (dim, rope))
    latents, ropes = (torch.randn(8, page, 1, size, generator=draw).half() for size in (dim, rope))
    table = torch.tensor([[3, 1], [0, 6]], dtype=torch.int32)
    paged = torch.empty(2, heads, dim, dtype=torch.float16, device="npu")
    torch_npu._npu_paged_attention(
        query.npu(), latents.npu(), latents.npu(), 1, heads, 0.3, table.npu(),
        torch.tensor(lengths, dtype=torch.int32), paged,
    )  # fmt: skip
    latent = torch_npu.atb.npu_multi_head_latent_attention(
        query.npu(), query_rope.npu(), latents.npu(), ropes.npu(), table.npu(), lengths,
        heads, 0.3, 1, cache_mode="krope_ctkv",
    )  # fmt: skip
    for row, length in enumerate(lengths):
        keys, rope_keys = (
            cache[table[row].long()].reshape(8, -1)[:length].float() for cache in (latents, ropes)
        )
        scores = query[row].float() @ keys.t()
        expected = (scores * 0.3).softmax(-1) @ keys
        torch.testing.assert_close(paged[row].cpu().float(), expected, rtol=1e-3, atol=1e-3)
        scores = scores + query_rope[row].float() @ rope_keys.t()
        expected = (scores * 0.3).softmax(-1) @ keys
        torch.testing.assert_close(latent[row].cpu().float(), expected, rtol=1e-3, atol=1e-3)
