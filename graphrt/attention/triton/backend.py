"""Decode attention by graphrt's own Triton kernels, for graphs of uniform batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch

from graphrt.attention.backend import AttentionBackend, AttentionStep
from graphrt.attention.prefill import varlen_attention
from graphrt.attention.shapes import AttentionShape
from graphrt.attention.triton.launch import Workspace, interpreted, row_blocks
from graphrt.attention.triton.operators import paged_decode, plan_spans
from graphrt.attention.triton.work import (
    fixed_splits,
    planned_splits,
    span_limit,
)
from graphrt.core.descriptor import BatchDescriptor
from graphrt.core.errors import InvalidInputError, InvalidOptionError
from graphrt.core.modes import AttentionSupport
from graphrt.core.segments import HostValues
from graphrt.core.tasks import HostArg, UpdatableTask

SplitPolicy = Literal["device", "fixed", "task"]
_POLICIES = ("device", "fixed", "task")


class TritonAttention(AttentionBackend):
    """Paged decode attention of grouped heads or latents, split along the keys, in two stages.

    FULL graphs serve uniform batches: one token a request, or 1 + k for speculative decoding. Mixed
    batches take `varlen_attention`. `splits` says who decides how the keys are split:

    - "device": a small kernel inside of the graph, once a step, from `context_lens`; one graph is
      good for all lengths. The default, as nothing else was faster (`docs/attention.md`).
    - "fixed": the longest context of the graph: `max_context`, or the first of its `bounds`.
    - "task": the host, at every step, with `updates()`: the launches are updatable tasks.
    """

    name: ClassVar[str] = "triton"

    def __init__(
        self,
        shape: AttentionShape,
        *,
        max_num_reqs: int,
        max_query_len: int = 1,
        splits: SplitPolicy = "device",
        max_context: int | None = None,
        waves: float = 2.0,
        group: str = "attention",
        device: torch.device | str = "cuda",
    ) -> None:
        """Buffers for batches of up to `max_num_reqs` requests of `max_query_len` tokens.

        A step has at most max(2 * reqs, reqs + `waves` * processors / KV heads) spans of keys.
        `max_context` is what tasks are captured for, `group` what they are called. Raises
        `InvalidOptionError`.
        """
        super().__init__(shape)
        device = torch.device(device)
        if splits not in _POLICIES or (splits == "task" and max_context is None):
            raise InvalidOptionError(
                "nobody decides how the keys are split",
                got=f"splits={splits!r}, max_context={max_context}",
                expected=f"one of {', '.join(_POLICIES)}; task with max_context",
                advice='splits="device"',
            )
        if device.type == "cpu" and not interpreted():
            raise InvalidOptionError(
                "these kernels run on a GPU, or in Triton's interpreter",
                got=str(device),
                expected="a GPU, or TRITON_INTERPRET=1 before Triton is imported",
                advice="SdpaAttention runs on every device",
            )
        self.max_num_reqs, self.max_query_len = max_num_reqs, max_query_len
        self.splits, self.max_context, self.group = splits, max_context, group
        self._programs = waves * _processors(device)
        self._workspace = self._new_workspace(device)
        self._task = UpdatableTask(
            group, self._issue, {"longest": HostArg(axis=None)}, at_capture=self._worst_case
        )

    def get_cudagraph_support(self) -> AttentionSupport:
        return AttentionSupport.UNIFORM_BATCH

    def updates(self, context_lens: Sequence[int]) -> dict[str, HostValues]:
        """`updates=` of a step, from the lengths on the host; needed for "task" alone.

        The longest one is rounded up by at most an eighth, so that most steps change nothing.
        """
        return {self.group: {"longest": _rounded(max(context_lens, default=1))}}

    def begin(
        self,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        *,
        query_start_loc: torch.Tensor | None = None,
        query_len: int | None = None,
        max_context: int | None = None,
    ) -> AttentionStep:
        step = super().begin(
            block_table,
            context_lens,
            query_start_loc=query_start_loc,
            query_len=query_len,
            max_context=max_context,
        )
        if step.query_len is None:
            return step
        reqs = len(context_lens)
        if reqs > self.max_num_reqs or step.query_len > self.max_query_len:
            raise InvalidInputError(
                "the batch is larger than the attention backend's buffers",
                got=f"{reqs} requests of {step.query_len} tokens",
                expected=f"{self.max_num_reqs} requests of {self.max_query_len} tokens at most",
                advice="raise max_num_reqs= and max_query_len= of the backend",
            )
        limit = self._limit(reqs, step.query_len)
        if self.splits == "device":
            splits = planned_splits(reqs, limit)
            plan_spans(step, splits, self._workspace)
            return replace(step, plan=splits)
        return replace(step, plan=fixed_splits(reqs, limit, step.max_context))

    def run(
        self,
        step: AttentionStep,
        query: torch.Tensor,
        caches: tuple[torch.Tensor, ...],
        out: torch.Tensor,
    ) -> None:
        if step.query_len is None:
            varlen_attention(self.shape, step, query, caches, out)
        elif self.splits == "task":
            self._task(step, query, caches, out)
        else:
            paged_decode(self.shape, step, query, caches, out, step.plan, self._workspace)

    def _issue(
        self,
        step: AttentionStep,
        query: torch.Tensor,
        caches: tuple[torch.Tensor, ...],
        out: torch.Tensor,
        *,
        longest: int,
    ) -> None:
        reqs, query_len = len(step.context_lens), step.query_len
        assert query_len is not None
        splits = fixed_splits(reqs, self._limit(reqs, query_len), longest)
        # Both stages whatever the number of spans, as an update cannot add or remove a kernel.
        paged_decode(
            self.shape, step, query, caches, out, splits, self._workspace, always_merge=True
        )

    def _worst_case(self, descriptor: BatchDescriptor) -> HostValues:
        assert self.max_context is not None
        return {"longest": _rounded(self.max_context)}

    def _limit(self, reqs: int, query_len: int) -> int:
        blocks = self.shape.kv_heads * row_blocks(self.shape, query_len)
        return span_limit(reqs, blocks, self._programs)

    def _new_workspace(self, device: torch.device) -> Workspace:
        rows = spans = plan_size = 0
        for query_len in range(1, self.max_query_len + 1):
            limit = planned_splits(self.max_num_reqs, self._limit(self.max_num_reqs, query_len))
            spans = limit.grid(self.max_num_reqs)
            rows = max(rows, spans * query_len * self.shape.num_heads)
            plan_size = max(plan_size, 1 + self.max_num_reqs + spans)
        floats: dict[str, Any] = {"dtype": torch.float32, "device": device}
        return Workspace(
            torch.zeros(plan_size, dtype=torch.int32, device=device),
            torch.empty(rows * self.shape.value_dim, **floats),
            torch.empty(rows, **floats),
        )


def _processors(device: torch.device) -> int:
    if device.type == "cpu":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _rounded(length: int) -> int:
    """Up to a multiple of an eighth of the largest power of two that is in `length`."""
    step = max(64, 1 << max(0, length.bit_length() - 4))
    return -(-max(length, 1) // step) * step
