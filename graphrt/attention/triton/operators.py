"""The kernels as operators of PyTorch, which captures on any device and compilers see.

`graphrt::schedule_spans` and `graphrt::paged_decode` write into given tensors and return nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from graphrt.attention.backend import AttentionStep
from graphrt.attention.shapes import AttentionShape, GroupedShape, LatentShape
from graphrt.attention.triton.launch import Workspace, decode, schedule
from graphrt.attention.triton.work import Room, Splits

_LIBRARY = torch.library.Library("graphrt", "FRAGMENT")
_LIBRARY.define(
    "schedule_spans(Tensor context_lens, Tensor(a!) schedule, float wave, int processors, "
    "float merge_tokens, int longest) -> ()"
)
_LIBRARY.define(
    "paged_decode(Tensor query, Tensor[] caches, Tensor block_table, Tensor context_lens, "
    "Tensor schedule, Tensor(a!) out, Tensor(b!) partial, Tensor(c!) sums, int query_len, "
    "int latent_rank, float scale, int num_splits, bool scheduled)"
    " -> ()"
)


def _on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """A context for launches on a tensor's device: Triton launches on the current one."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def _schedule_spans(
    context_lens: torch.Tensor,
    schedule_out: torch.Tensor,
    wave: float,
    processors: int,
    merge_tokens: float,
    longest: int,
) -> None:
    with _on_device_of(context_lens):
        schedule(context_lens, schedule_out, Room(wave, processors, merge_tokens), longest)


def _paged_decode(
    query: torch.Tensor,
    caches: list[torch.Tensor],
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    schedule: torch.Tensor,
    out: torch.Tensor,
    partial: torch.Tensor,
    sums: torch.Tensor,
    query_len: int,
    latent_rank: int,
    scale: float,
    num_splits: int,
    scheduled: bool,
) -> None:
    heads, page_size = query.shape[1], caches[0].shape[1]
    shape: AttentionShape
    if latent_rank:
        rope_dim = query.shape[2] - latent_rank
        shape = LatentShape(heads, latent_rank, rope_dim, page_size, scale)
    else:
        shape = GroupedShape(heads, caches[0].shape[2], query.shape[2], page_size, scale)
    with _on_device_of(query):
        decode(
            shape,
            AttentionStep(block_table, context_lens, query_len, None, 0),
            query,
            tuple(caches),
            out,
            Splits(num_splits, scheduled),
            Workspace(schedule, partial, sums),
        )


def _meta(*_: object) -> None:
    """All results are written in place."""


_LIBRARY.impl("schedule_spans", _schedule_spans, "CompositeExplicitAutograd")
_LIBRARY.impl("paged_decode", _paged_decode, "CompositeExplicitAutograd")
_LIBRARY.impl("schedule_spans", _meta, "Meta")
_LIBRARY.impl("paged_decode", _meta, "Meta")


def schedule_spans(step: AttentionStep, room: Room, workspace: Workspace) -> None:
    """Write the spans of the lengths of `step` to `workspace.schedule`, on the device."""
    torch.ops.graphrt.schedule_spans(
        step.context_lens,
        workspace.schedule,
        room.wave,
        room.processors,
        room.merge_tokens,
        step.max_context,
    )


def paged_decode(
    shape: AttentionShape,
    step: AttentionStep,
    query: torch.Tensor,
    caches: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    splits: Splits,
    workspace: Workspace,
) -> None:
    """Write the attention of a uniform batch to `out`; arguments as of `launch.decode`."""
    assert step.query_len is not None
    torch.ops.graphrt.paged_decode(
        query,
        caches,
        step.block_table,
        step.context_lens,
        workspace.schedule,
        out,
        workspace.partial,
        workspace.sums,
        step.query_len,
        shape.rank if isinstance(shape, LatentShape) else 0,
        shape.softmax_scale,
        splits.num_splits,
        splits.scheduled,
    )
