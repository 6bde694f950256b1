"""Decode attention by graphrt's own Triton kernels, for graphs of uniform batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch

from graphrt.attention.backend import AttentionBackend, AttentionStep
from graphrt.attention.prefill.query_tiles import QueryTiles, with_tiles
from graphrt.attention.prefill.varlen import varlen_attention
from graphrt.attention.shapes import AttentionShape, check_strides
from graphrt.attention.triton.launch import Workspace, interpreted, room_for
from graphrt.attention.triton.operators import paged_decode, schedule_spans
from graphrt.attention.triton.work import SHORT, Splits, fixed_splits, scheduled_splits
from graphrt.core.base.errors import InvalidInputError, InvalidOptionError
from graphrt.core.base.option_values import choice, count_of
from graphrt.core.batch.context import current_context
from graphrt.core.batch.modes import AttentionSupport

SplitPolicy = Literal["device", "fixed"]
_POLICIES = ("device", "fixed")


class TritonAttention(AttentionBackend):
    """Paged decode attention of grouped heads or latents, split along the keys, in two stages.

    FULL graphs serve uniform batches: one token a request, or 1 + k for speculative decoding. Mixed
    batches take `varlen_attention`. `splits` says who decides how the keys are split:

    - "device": a small kernel inside of the graph, once a step, from `context_lens`; one graph is
      good for all lengths. The default, as nothing else was faster (`docs/how-to/attention.md`).
    - "fixed": the longest context of the graph: `max_context`, or the first of its `bounds`.
    """

    name: ClassVar[str] = "graphrt-triton"

    def __init__(
        self,
        shape: AttentionShape,
        *,
        max_num_reqs: int,
        max_query_len: int = 1,
        splits: SplitPolicy = "device",
        max_context: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
    ) -> None:
        """Buffers for batches of up to `max_num_reqs` requests of `max_query_len` tokens.

        `dtype` is that of the queries and caches. `max_context` is the longest context there can
        be, if that is less than a block table holds. Raises `InvalidOptionError`.
        """
        super().__init__(shape)
        device = torch.device(device)
        choice(*_POLICIES)("splits", splits)
        max_num_reqs = count_of("max_num_reqs", max_num_reqs, least=1)
        max_query_len = count_of("max_query_len", max_query_len, least=1)
        if max_context is not None:
            max_context = count_of("max_context", max_context, least=1)
        if device.type == "cpu" and not interpreted():
            raise InvalidOptionError(
                "these kernels run on a GPU, or in Triton's interpreter",
                got=str(device),
                expected="a GPU, or TRITON_INTERPRET=1 before Triton is imported",
                advice="SdpaAttention runs on every device",
            )
        self.max_num_reqs, self.max_query_len = max_num_reqs, max_query_len
        self.splits, self.max_context = splits, max_context
        processors = _processors(device)
        # Query length -> the room for spans of such steps.
        self._rooms = {
            query_len: room_for(shape, dtype, query_len, processors)
            for query_len in range(1, max_query_len + 1)
        }
        self._workspace = self._new_workspace(device)

    def decodes(self, query_len: int, reqs: int) -> bool:
        return query_len <= self.max_query_len and reqs <= self.max_num_reqs

    def get_cudagraph_support(self) -> AttentionSupport:
        return AttentionSupport.UNIFORM_BATCH

    def begin(
        self,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        *,
        query_start_loc: torch.Tensor | None = None,
        query_len: int | None = None,
        max_context: int | None = None,
    ) -> AttentionStep:
        context = current_context()
        # `begin` takes the graph's own bound, which is nearer than the backend's `max_context`.
        bounds = (
            context is not None and context.descriptor is not None and context.descriptor.bounds
        )
        if max_context is None and not bounds:
            max_context = self.max_context
        step = super().begin(
            block_table,
            context_lens,
            query_start_loc=query_start_loc,
            query_len=query_len,
            max_context=max_context,
        )
        _check_tables(step)
        if step.query_len is None:
            return with_tiles(self.shape, step)
        reqs = len(step.context_lens)
        if not self.decodes(step.query_len, reqs):
            captured = context is not None and context.capture is not None
            if query_len is None and not captured:
                # A prefill that happens to be uniform, or a batch larger than any graph.
                return with_tiles(self.shape, step)
            raise InvalidInputError(
                "the batch is larger than the attention backend's buffers",
                got=f"{reqs} requests of {step.query_len} tokens",
                expected=f"{self.max_num_reqs} requests of {self.max_query_len} tokens at most",
                advice="raise max_num_reqs= and max_query_len= of the backend",
            )
        room = self._rooms[step.query_len]
        if step.max_context <= max(SHORT, room.shortest_span(reqs)):
            return replace(step, prepared=(Splits(1), self._workspace))
        if self.splits != "fixed":
            splits = scheduled_splits(reqs, room, step.max_context)
            # The step's own: two steps of one forward may be under way.
            size = 1 + reqs + splits.num_splits
            spans = step.context_lens.new_empty(size, dtype=torch.int32)
            workspace = replace(self._workspace, schedule=spans)
            schedule_spans(step, room, workspace)
            return replace(step, prepared=(splits, workspace))
        splits = fixed_splits(step.max_context, reqs, room)
        return replace(step, prepared=(splits, self._workspace))

    def run(
        self,
        step: AttentionStep,
        query: torch.Tensor,
        caches: tuple[torch.Tensor, ...],
        out: torch.Tensor,
    ) -> None:
        check_strides(query, *caches, out)
        if step.query_len is None or isinstance(step.prepared, QueryTiles):
            varlen_attention(self.shape, step, query, caches, out)
        else:
            paged_decode(self.shape, step, query, caches, out, *step.prepared)

    @property
    def workspace_bytes(self) -> int:
        """Device memory of the persistent buffers."""
        buffers = vars(self._workspace).values()
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)

    def _new_workspace(self, device: torch.device) -> Workspace:
        reqs = self.max_num_reqs
        spans = {query_len: room.limit(reqs) for query_len, room in self._rooms.items()}
        # With one number for all, requests times their splits are up to twice the limit.
        factor = 1 if self.splits == "device" else 2
        rows = (
            max(factor * count * length for length, count in spans.items()) * self.shape.num_heads
        )
        floats: dict[str, Any] = {"dtype": torch.float32, "device": device}
        return Workspace(
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.empty(rows * self.shape.value_dim, **floats),
            torch.empty(rows, **floats),
        )


def _check_tables(step: AttentionStep) -> None:
    """Raise `InvalidInputError` for metadata that the kernels cannot read: they take one stride of
    the block table, and none of the lengths."""
    check_strides(step.block_table, step.context_lens)
    kinds = {step.block_table.dtype, step.context_lens.dtype}
    if not kinds <= {torch.int32, torch.int64} or len(step.block_table) < len(step.context_lens):
        raise InvalidInputError(
            "the metadata of a step does not fit",
            got=f"block table {tuple(step.block_table.shape)} {step.block_table.dtype}, lengths "
            f"{tuple(step.context_lens.shape)} {step.context_lens.dtype}",
            expected="int32 or int64, and a row of the table for every length",
            advice="see AttentionStep",
        )


def _processors(device: torch.device) -> int:
    if device.type == "cpu":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
