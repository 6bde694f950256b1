"""Attention operators of torch_npu as updatable tasks, and the updates that hosts build for them.

A task is called in the forward like its operator, with torch_npu's argument names, but for the
lengths, which come with `updates=`. `out=` and `workspace=` are given by the caller:

    attention = fused_infer_attention(max_kv_len=4096)
    attention(query, key, value, block_table=table, input_layout="TND", ..., workspace=workspace,
              out=[output, lse], task="layers.0")

An operator that is not here takes as few lines: see `attention_task`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from graphrt.ascend.driver.library import torch_npu
from graphrt.core.base.errors import InvalidUpdateError
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.replay.host_args import HostArg, HostValues
from graphrt.core.replay.tasks import UpdatableTask

__all__ = [
    "AttentionTask",
    "attention_task",
    "fused_infer_attention",
    "fused_infer_attention_v2",
    "mla_attention",
    "paged_attention",
    "update_attn_params",
    "update_mla_attn_params",
]


class AttentionTask(UpdatableTask):
    """A task whose host arguments are the lengths of the queries and of the keys.

    `queries` and `keys` are what its operator calls them; `queries` is None where it takes none.
    """

    queries: str | None = None
    keys: str = ""

    def lengths(self, keys: Any, queries: Any = None) -> HostValues:
        """The update of this task; tensors on the host become lists."""
        values = {self.keys: _listed(self.keys, keys)}
        if self.queries is not None and queries is not None:
            values[self.queries] = _listed(self.queries, queries)
        return values


def attention_task(
    group: str,
    issue: Callable[..., object],
    *,
    keys: str,
    queries: str | None = None,
    max_kv_len: int,
    cumulative: bool = False,
    spare_request: bool = False,
) -> AttentionTask:
    """A task of any operator with lengths: `issue(*args, **lengths, **kwargs)` calls it.

    `max_kv_len` is the length of every key at warm-up and capture. `cumulative` says that `queries`
    is a running sum, which must end at the number of tokens. With `spare_request` the lists have
    one entry more than the graph has requests, to which padding tokens belong when all requests are
    live: for graphs of mixed batches.
    """
    axis: Literal["reqs", "reqs+1"] = "reqs+1" if spare_request else "reqs"
    pad: Literal["cumulative", "zero"] = "cumulative" if cumulative else "zero"

    def at_capture(descriptor: BatchDescriptor) -> HostValues:
        reqs, tokens = descriptor.num_reqs or 1, descriptor.num_tokens
        worst: dict[str, Any] = {keys: [max_kv_len] * reqs}
        if queries is not None:
            query_len = descriptor.query_len or tokens // reqs
            ends = [min(tokens, query_len * (i + 1)) for i in range(reqs)]
            worst[queries] = [*ends[:-1], tokens] if cumulative else [query_len] * reqs
        return worst

    host_args = {keys: HostArg(axis, "zero")}
    if queries is not None:
        host_args[queries] = HostArg(axis, pad, optional=not cumulative)
    task = AttentionTask(group, issue, host_args, at_capture=at_capture)
    task.queries, task.keys = queries, keys
    return task


def fused_infer_attention(
    group: str = "attention", *, max_kv_len: int, layout: str = "TND", spare_request: bool = False
) -> AttentionTask:
    """`torch_npu.npu_fused_infer_attention_score.out`; query lengths add up in layout TND."""
    return attention_task(
        group,
        lambda *args, **kwargs: torch_npu().npu_fused_infer_attention_score.out(*args, **kwargs),
        queries="actual_seq_lengths" if layout == "TND" else None,
        keys="actual_seq_lengths_kv",
        max_kv_len=max_kv_len,
        cumulative=True,
        spare_request=spare_request,
    )


def fused_infer_attention_v2(
    group: str = "attention", *, max_kv_len: int, layout: str = "TND", spare_request: bool = False
) -> AttentionTask:
    """`torch_npu.npu_fused_infer_attention_score_v2.out`; query lengths add up in layout TND."""
    return attention_task(
        group,
        lambda *args, **kwargs: torch_npu().npu_fused_infer_attention_score_v2.out(*args, **kwargs),
        queries="actual_seq_qlen" if layout == "TND" else None,
        keys="actual_seq_kvlen",
        max_kv_len=max_kv_len,
        cumulative=True,
        spare_request=spare_request,
    )


def paged_attention(group: str = "attention", *, max_kv_len: int) -> AttentionTask:
    """`torch_npu._npu_paged_attention`, whose lengths are a tensor on the host."""
    return attention_task(group, _issue_paged_attention, keys="context_lens", max_kv_len=max_kv_len)


def mla_attention(
    group: str = "attention", *, max_kv_len: int, query_lens: bool = False
) -> AttentionTask:
    """`torch_npu.atb.npu_multi_head_latent_attention`; `query_lens` for several tokens a request.

    MLA by way of `npu_fused_infer_attention_score` is `fused_infer_attention`.
    """
    return attention_task(
        group,
        _issue_mla_attention,
        queries="qseqlen" if query_lens else None,
        keys="context_lens",
        max_kv_len=max_kv_len,
    )


def update_attn_params(
    task: AttentionTask, attn_metadata: Mapping[str, Any]
) -> dict[str, HostValues]:
    """`updates=` for a step, from the metadata of each layer by the name of its task.

    Reads what vllm-ascend calls `seq_lens_list` (or `seq_lens`) and `actual_seq_lengths_q` (or
    `query_start_loc_list`). Raises `InvalidUpdateError` where a layer has none of them.
    """
    return _by_layer(attn_metadata, lambda metadata: _lengths_of(task, metadata))


def update_mla_attn_params(
    task: AttentionTask, attn_metadata: Mapping[str, Any], *, query_len: int | None = None
) -> dict[str, HostValues]:
    """`updates=` for a step of MLA layers, from the `decode` part of each layer's metadata.

    `query_len` is that of speculative decoding, where every request has as many tokens.
    """

    def lengths(metadata: Any) -> HostValues:
        decode = getattr(metadata, "decode", metadata)
        if query_len is None:
            return _lengths_of(task, decode)
        keys = _first(decode, "seq_lens_list", "seq_lens")
        return task.lengths(keys, [query_len * (i + 1) for i in range(len(keys))])

    return _by_layer(attn_metadata, lengths)


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
    # By position, where torch_npu's own handler looks for the lengths too.
    torch_npu()._npu_paged_attention(
        query,
        key_cache,
        value_cache,
        num_kv_heads,
        num_heads,
        scale_value,
        block_table,
        torch.tensor(context_lens, dtype=torch.int32),
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
    **optional: Any,
) -> None:
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


def _lengths_of(task: AttentionTask, metadata: Any) -> HostValues:
    keys = _first(metadata, "seq_lens_list", "seq_lens")
    if task.queries is None:
        return task.lengths(keys)
    return task.lengths(keys, _first(metadata, "actual_seq_lengths_q", "query_start_loc_list"))


def _by_layer(
    attn_metadata: Mapping[str, Any], lengths: Callable[[Any], HostValues]
) -> dict[str, HostValues]:
    # Layers mostly share one object; sharing its values makes them be checked only once.
    shared: dict[int, HostValues] = {}
    for metadata in attn_metadata.values():
        if id(metadata) not in shared:
            shared[id(metadata)] = lengths(metadata)
    return {layer: shared[id(metadata)] for layer, metadata in attn_metadata.items()}


def _first(metadata: Any, *names: str) -> Any:
    for name in names:
        value = getattr(metadata, name, None)
        if value is not None:
            return value
    raise InvalidUpdateError(
        "the attention metadata has no lengths on the host",
        got=type(metadata).__name__,
        expected=" or ".join(names),
        advice="set it as a list, or pass updates={layer: {argument: lengths}} yourself",
    )


def _listed(name: str, lengths: Any) -> list[int]:
    if isinstance(lengths, torch.Tensor):
        if lengths.device.type != "cpu":
            raise InvalidUpdateError(
                f"the lengths {name!r} are on the device, where reading them would wait for it",
                got=str(lengths.device),
                expected="a list, or a tensor on the host",
                advice="keep the scheduler's own list of them",
            )
        found: list[int] = lengths.tolist()
        return found
    return list(lengths)
