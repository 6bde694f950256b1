"""The updates of a step, from the attention metadata that hosts build for each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from graphrt.ascend.attention.task import AttentionTask, listed
from graphrt.core.base.errors import InvalidUpdateError
from graphrt.core.replay.tasks import HostValues


def update_attn_params(
    task: AttentionTask, attn_metadata: Mapping[str, Any]
) -> dict[str, HostValues]:
    """`updates=` for a step, from the metadata of each layer by the name of its task.

    Reads what vllm-ascend calls `seq_lens_list` (or `seq_lens`) and `actual_seq_lengths_q` (or
    `query_start_loc_list`), which are running sums. Raises `InvalidUpdateError` where a layer has
    none of them.
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
        return task.lengths(keys, _queries(task, [query_len * (i + 1) for i in range(len(keys))]))

    return _by_layer(attn_metadata, lengths)


def _lengths_of(task: AttentionTask, metadata: Any) -> HostValues:
    keys = _first(metadata, "seq_lens_list", "seq_lens")
    if task.queries is None:
        return task.lengths(keys)
    ends = _first(metadata, "actual_seq_lengths_q", "query_start_loc_list")
    return task.lengths(keys, _queries(task, ends))


def _queries(task: AttentionTask, ends: Any) -> Any:
    """Query lengths as the task's operator takes them, from the running sums that hosts give."""
    if task.adds_up:
        return ends
    ends = listed(task.queries or "", ends)
    return [int(end) - int(start) for start, end in zip((0, *ends), ends, strict=False)]


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
