"""The attention operators of torch_npu, and how each is called with its lengths."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from graphrt.ascend.attention import workspaces
from graphrt.ascend.attention.mla import mla_options
from graphrt.ascend.attention.task import AttentionTask, Room, attention_task
from graphrt.ascend.driver.library import torch_npu
from graphrt.core.base.errors import InvalidUpdateError
from graphrt.core.base.option_values import flag, wrong_type

_LAYOUT = re.compile("[BSTNDH]{3,4}(_[BSTNDH]{3,4})?")

# By its number of dimensions, where a cache of the fused operators has its block size: [blocks,
# block size, H], [blocks, heads, block size, D] or, in format NZ, [blocks, heads, D / 16, block
# size, 16].
_FUSED_CACHES = {3: 1, 4: 2, 5: 3}


def fused_infer_attention(
    group: str = "attention", *, max_kv_len: int, layout: str = "TND", spare_request: bool = False
) -> AttentionTask:
    """`torch_npu.npu_fused_infer_attention_score.out`; with tokens in its `layout`, as in
    TND, query lengths are a sum."""
    return attention_task(
        group,
        lambda *args, **kwargs: torch_npu().npu_fused_infer_attention_score.out(*args, **kwargs),
        workspace=workspaces.of_fused,
        room=_fused_room,
        queries="actual_seq_lengths" if _has_tokens(layout) else None,
        keys="actual_seq_lengths_kv",
        max_kv_len=max_kv_len,
        cumulative=True,
        spare_request=spare_request,
    )


def fused_infer_attention_v2(
    group: str = "attention", *, max_kv_len: int, layout: str = "TND", spare_request: bool = False
) -> AttentionTask:
    """`torch_npu.npu_fused_infer_attention_score_v2.out`; with tokens in its `layout`, as in
    TND, query lengths are a sum."""
    return attention_task(
        group,
        lambda *args, **kwargs: torch_npu().npu_fused_infer_attention_score_v2.out(*args, **kwargs),
        workspace=workspaces.of_fused_v2,
        room=_fused_room,
        queries="actual_seq_qlen" if _has_tokens(layout) else None,
        keys="actual_seq_kvlen",
        max_kv_len=max_kv_len,
        cumulative=True,
        spare_request=spare_request,
    )


def paged_attention(group: str = "attention", *, max_kv_len: int) -> AttentionTask:
    """`torch_npu._npu_paged_attention`, whose lengths are a tensor on the host.

    Every live request must have keys: ATB shifts the rows of the requests behind one without.
    """
    return attention_task(
        group,
        _issue_paged_attention,
        keys="context_lens",
        max_kv_len=max_kv_len,
        least_kv_len=1,
        workspace=workspaces.of_paged,
        room=_room_of(("key_cache", 1), ("block_table", 6), ("num_kv_heads", 3)),
    )


def mla_attention(
    group: str = "attention", *, max_kv_len: int, query_lens: bool = False
) -> AttentionTask:
    """`torch_npu.atb.npu_multi_head_latent_attention`; `query_lens` for several tokens a request,
    by `calc_type_spec`. Every live request must have keys, as with paged attention.

    MLA by way of `npu_fused_infer_attention_score` is `fused_infer_attention`.
    """
    flag("query_lens", query_lens)
    return attention_task(
        group,
        _issue_mla_attention,
        queries="qseqlen" if query_lens else None,
        keys="context_lens",
        max_kv_len=max_kv_len,
        least_kv_len=1,
        workspace=workspaces.of_mla,
        room=_room_of(("ctkv", 2), ("block_tables", 4), ("kv_headnum", 7)),
    )


def _has_tokens(layout: str) -> bool:
    """Whether requests are one behind another in a layout, which may name that of the output too.
    Raises `InvalidOptionError` for a text that is none."""
    if not isinstance(layout, str) or not _LAYOUT.fullmatch(layout):
        raise wrong_type("layout", layout, "TND, BSND, BNSD, BSH or another one", 'layout="TND"')
    return "T" in layout


def _fused_room(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """As `room_in_blocks`; raises `InvalidUpdateError` for a `block_size` that is not the cache's,
    by which the operator would read memory of others."""
    table, block_size = kwargs.get("block_table"), kwargs.get("block_size", 0)
    if not isinstance(table, torch.Tensor) or not block_size:
        return None
    cache = args[1] if len(args) > 1 else kwargs.get("key")
    if isinstance(cache, torch.Tensor) and cache.dim() in _FUSED_CACHES:
        dimension = _FUSED_CACHES[cache.dim()]
        if block_size != cache.shape[dimension]:
            raise InvalidUpdateError(
                "attention has a block_size that is not its cache's",
                got=f"block_size={block_size} and a cache of {list(cache.shape)}",
                expected=f"{cache.shape[dimension]}, dimension {dimension} of the cache",
                advice=f"block_size={cache.shape[dimension]}, and a block table by it",
            )
    return int(table.shape[-1]) * int(block_size)


def _room_of(*named: tuple[str, int]) -> Room:
    """The `Room` of an operator with a paged cache. `named` are the names and positions of its
    arguments: the cache, the block table, and the number of heads in the cache."""

    def room(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        return room_in_blocks(
            *(args[index] if len(args) > index else kwargs.get(name) for name, index in named)
        )

    return room


def room_in_blocks(cache: Any, table: Any, kv_heads: Any) -> int | None:
    """How many keys a row of `table`, [requests, blocks], has room for; None without two tensors.

    `cache` is [blocks, block size, kv_heads, width], or in format NZ [blocks, kv_heads * width /
    16, block size, 16].
    """
    if not isinstance(cache, torch.Tensor) or not isinstance(table, torch.Tensor):
        return None
    if cache.dim() < 3:
        return None
    # In the other format the last dimension may be 16 too: then the third one is the heads.
    is_nz = cache.dim() == 4 and cache.shape[3] == 16 and cache.shape[2] != kv_heads
    return int(table.shape[-1]) * int(cache.shape[2 if is_nz else 1])


def _issue_paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: torch.Tensor,
    *,
    context_lens: Sequence[int],
    out: torch.Tensor,
    **workspace: torch.Tensor | None,
) -> None:
    # By position: torch_npu's handler for updates looks for the lengths there.
    torch_npu()._npu_paged_attention(
        query,
        key_cache,
        value_cache,
        num_kv_heads,
        num_heads,
        scale_value,
        block_table,
        torch.tensor(context_lens, dtype=torch.int32, device="cpu"),
        out,
        **workspace,
    )


def _issue_mla_attention(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    ctkv: torch.Tensor,
    k_rope: torch.Tensor,
    block_tables: torch.Tensor,
    q_headnum: int,
    qk_scale: float,
    kv_headnum: int,
    *,
    context_lens: Sequence[int],
    output: torch.Tensor,
    workspace: torch.Tensor | None = None,
    **optional: Any,
) -> None:
    optional = mla_options(optional)
    if workspace is not None:
        # Only the overload with `lse` takes a workspace. ATB ignores an `lse` that it need not
        # write, so any tensor will do.
        optional["workspace"] = workspace
        if optional.get("lse") is None:
            optional["lse"] = workspace[:1]
    if optional.get("lse") is not None:
        # Without return_lse this overload of torch_npu 2.13 ends the process: it returns a
        # reference to a tensor that was destroyed.
        optional["return_lse"] = True
    torch_npu().atb.npu_multi_head_latent_attention(
        q_nope,
        q_rope,
        ctkv,
        k_rope,
        block_tables,
        context_lens,
        q_headnum,
        qk_scale,
        kv_headnum,
        output=output,
        **optional,
    )
