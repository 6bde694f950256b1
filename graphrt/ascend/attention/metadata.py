"""The updates of a step, from the attention metadata that hosts build for each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphrt.ascend.attention.task import AttentionTask, listed
from graphrt.core.base.errors import InvalidUpdateError
from graphrt.core.base.option_values import check_kind, count_of, items_of
from graphrt.core.replay.tasks import HostValues


def update_attn_params(
    task: AttentionTask, attn_metadata: Mapping[str, Any], *, cp_rank: tuple[int, ...] | None = None
) -> dict[str, HostValues]:
    """`updates=` for a step, from the metadata of each layer by the name of its task.

    Reads what vllm-ascend calls `seq_lens_list` (or `seq_lens`) and `actual_seq_lengths_q` (or
    `query_start_loc_list`), which are running sums. With context parallelism the keys are those of
    `cp_rank`: `(dcp_rank,)`, or `(pcp_rank, dcp_rank)` where vllm-ascend counts by both. Raises
    `InvalidUpdateError` where a layer has none of them, or needs another `cp_rank`, and
    `InvalidOptionError` for other arguments of a wrong type.
    """
    if cp_rank is not None:
        ranks = items_of("cp_rank", cp_rank, "(0,)", InvalidUpdateError)
        cp_rank = tuple(
            count_of("a rank of cp_rank", rank, least=0, error=InvalidUpdateError, example=0)
            for rank in ranks
        )
    return _by_layer(task, attn_metadata, lambda metadata: _lengths_of(task, metadata, cp_rank))


def update_mla_attn_params(
    task: AttentionTask, attn_metadata: Mapping[str, Any], *, query_len: int | None = None
) -> dict[str, HostValues]:
    """`updates=` for a step of MLA layers, from the `decode` part of each layer's metadata.

    With context parallelism it is `cp_seq_len`, of this rank. `query_len` is that of speculative
    decoding, where every request has as many tokens. Raises as `update_attn_params` does.
    """
    if query_len is not None:
        query_len = count_of("query_len", query_len, least=1, error=InvalidUpdateError)

    def lengths(metadata: Any) -> HostValues:
        decode = getattr(metadata, "decode", metadata)
        if query_len is None:
            return _lengths_of(task, decode)
        keys = _keys_of(decode)
        return task.lengths(keys, _queries(task, [query_len * (i + 1) for i in range(len(keys))]))

    return _by_layer(task, attn_metadata, lengths)


def _lengths_of(
    task: AttentionTask, metadata: Any, cp_rank: tuple[int, ...] | None = None
) -> HostValues:
    keys = _keys_of(metadata, cp_rank)
    if task.queries is None:
        return task.lengths(keys)
    ends = _first(metadata, "actual_seq_lengths_q", "query_start_loc_list")
    return task.lengths(keys, _queries(task, ends))


def _keys_of(metadata: Any, cp_rank: tuple[int, ...] | None = None) -> Any:
    """The key lengths of the requests, in tokens; with context parallelism, this rank's share."""
    decode = getattr(metadata, "decode_meta", None)
    # By request and rank of decode context parallelism; 0.23: and before it of that of prefills.
    for by_rank in ("num_computed_tokens_of_dcp", "num_computed_tokens_of_pcp_dcp"):
        lengths = getattr(decode, by_rank, None)
        if lengths is None:
            continue
        if not isinstance(lengths, torch.Tensor):
            lengths = torch.as_tensor(lengths, device="cpu")
        sizes = lengths.shape[1:]
        if (
            cp_rank is None
            or len(cp_rank) != len(sizes)
            or any(rank >= size for rank, size in zip(cp_rank, sizes, strict=True))
        ):
            raise InvalidUpdateError(
                "the attention metadata is of context parallelism, where each rank has lengths of "
                "its own",
                got=f"cp_rank={cp_rank}, {by_rank} of shape {tuple(lengths.shape)}",
                expected=f"a tuple of {len(sizes)}: the rank on each axis behind the first, each "
                "below the axis's size",
                advice="update_attn_params(..., cp_rank=(dcp_rank,))",
            )
        of_rank: Any = (slice(None), *cp_rank)
        return lengths[of_rank]
    return _first(metadata, "cp_seq_len", "seq_lens_list", "seq_lens")


def _queries(task: AttentionTask, ends: Any) -> Any:
    """Query lengths as the task's operator takes them, from the running sums that hosts give."""
    if task.adds_up:
        return ends
    ends = listed(task.queries or "", ends)
    return [int(end) - int(start) for start, end in zip((0, *ends), ends, strict=False)]


def _by_layer(
    task: AttentionTask, attn_metadata: Mapping[str, Any], lengths: Callable[[Any], HostValues]
) -> dict[str, HostValues]:
    check_kind("task", task, AttentionTask, optional=False, example="paged_attention(...)")
    check_kind("attn_metadata", attn_metadata, Mapping, optional=False, example='{"layers.0": ...}')
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
