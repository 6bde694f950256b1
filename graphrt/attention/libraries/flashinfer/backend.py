"""Attention by the FlashInfer library, whose kernels are planned on the host at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from graphrt.attention.backend import AttentionBackend, AttentionStep
from graphrt.attention.levels.lookup import get_cudagraph_support
from graphrt.attention.libraries.flashinfer.pages import page_lists, starts
from graphrt.attention.libraries.flashinfer.wrappers import Buffers, StepLists, wrappers_of
from graphrt.attention.libraries.optional import load
from graphrt.attention.shapes import AttentionShape
from graphrt.core.base.errors import InvalidInputError
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import AttentionSupport
from graphrt.core.runner.host import Phase

WORKSPACE_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Lengths:
    """The lengths of a step's live requests, on the host."""

    context_lens: tuple[int, ...]
    query_lens: tuple[int, ...]

    def padded(self, reqs: int, query_len: int) -> Lengths:
        """With padding requests of `query_len` tokens; raises `InvalidInputError`."""
        missing = reqs - len(self.context_lens)
        if missing < 0:
            raise InvalidInputError(
                "the lengths are those of another step",
                got=f"{len(self.context_lens)} requests",
                expected=f"at most {reqs}, the rows of the block table",
                advice="call lengths() before each step",
            )
        return Lengths(self.context_lens + (0,) * missing, self.query_lens + (query_len,) * missing)


class FlashInferAttention(AttentionBackend):
    """`flashinfer`: decode of one token per request in FULL graphs, other batches eagerly.

    Its plans are made in `build` out of lengths on the host: call `lengths` before each step.
    Without that, `build` reads them from the device and waits for it; `device_reads` counts that.

    Written against the library's interface; it has not run on hardware yet.
    """

    name: ClassVar[str] = "flashinfer"

    def __init__(
        self,
        shape: AttentionShape,
        *,
        max_reqs: int,
        max_blocks: int,
        dtype: torch.dtype,
        device: torch.device | str = "cuda",
        block_table: str = "block_table",
        context_lens: str = "context_lens",
        query_start_loc: str = "query_start_loc",
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        """`max_reqs` and `max_blocks` are the largest block table, `dtype` that of query and cache;
        `block_table`, `context_lens` and `query_start_loc` name the runner's inputs."""
        super().__init__(shape)
        self.device_reads = 0
        # The names of these inputs of the runner.
        self._inputs = block_table, context_lens, query_start_loc
        library = load("flashinfer", "flashinfer-python")
        buffers = Buffers.allocate(max_reqs, max_blocks, workspace_bytes, device)
        self._wrappers = wrappers_of(library, shape, dtype, buffers)
        self._eager_wrapper = self._wrappers.eager()
        # Requests of a captured size -> the wrapper of its graph.
        self._decode_wrappers: dict[int, Any] = {}
        # The wrapper that `build` has planned for this step, and the step's tokens.
        self._planned_wrapper: Any = None
        self._live_tokens = 0
        # The lengths of the next step, if the host has set them.
        self._next_lengths: Lengths | None = None

    def get_cudagraph_support(self) -> AttentionSupport:
        # Only the wrapper for one token per request is planned for graphs here.
        single = AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return min(single, get_cudagraph_support(self.name))

    def lengths(self, context_lens: Sequence[int], query_lens: Sequence[int] | None = None) -> None:
        """Set the lengths of the next step's live requests: contexts, and numbers of new tokens,
        None for one each."""
        queries = [1] * len(context_lens) if query_lens is None else query_lens
        if len(queries) != len(context_lens):
            raise InvalidInputError(
                "there are not as many context lengths as query lengths",
                got=f"{len(context_lens)} context lengths, {len(queries)} query lengths",
                expected="equally many",
                advice="one entry of both lists for each request",
            )
        self._next_lengths = Lengths(tuple(context_lens), tuple(queries))

    def build(
        self, buffers: Mapping[str, torch.Tensor], descriptor: BatchDescriptor, phase: Phase
    ) -> None:
        block_table = buffers[self._inputs[0]]
        reqs, max_blocks = block_table.shape
        decode = descriptor.uniform and descriptor.query_len == 1
        lengths = self._lengths(buffers, descriptor, phase).padded(reqs, int(decode))
        lists = page_lists(lengths.context_lens, self.shape.page_size, max_blocks)
        query_starts = starts(torch.tensor(lengths.query_lens, dtype=torch.int32, device="cpu"))
        step = StepLists(query_starts, lists, lists.indices(block_table))
        wrapper = self._wrapper(reqs, phase) if decode else self._eager_wrapper
        self._wrappers.plan(wrapper, step, decode=wrapper is not self._eager_wrapper)
        self._planned_wrapper = wrapper
        self._live_tokens = sum(lengths.query_lens)

    def run(
        self,
        step: AttentionStep,
        query: torch.Tensor,
        caches: tuple[torch.Tensor, ...],
        out: torch.Tensor,
    ) -> None:
        live = self._live_tokens
        self._wrappers.run(self._planned_wrapper, query[:live], caches, out[:live])
        if step.query_len == 1:
            # Padding requests have attended to a token of the dummy page.
            out.masked_fill_((step.context_lens <= 0)[:, None, None], 0)

    def _lengths(
        self, buffers: Mapping[str, torch.Tensor], descriptor: BatchDescriptor, phase: Phase
    ) -> Lengths:
        block_table, context_lens, query_start_loc = self._inputs
        reqs, max_blocks = buffers[block_table].shape
        if phase in ("warmup", "capture"):
            return worst_case(descriptor.num_tokens, reqs, max_blocks * self.shape.page_size)
        lengths, self._next_lengths = self._next_lengths, None
        if lengths is not None:
            return lengths
        self.device_reads += 1
        contexts = tuple(buffers[context_lens].tolist())
        if descriptor.uniform:
            return Lengths(contexts, (descriptor.query_len or 1,) * reqs)
        return Lengths(contexts, tuple(buffers[query_start_loc].diff().tolist()))

    def _wrapper(self, reqs: int, phase: Phase) -> Any:
        # A wrapper has its own workspaces: only sizes that are captured get one.
        if phase in ("warmup", "capture") and reqs not in self._decode_wrappers:
            self._decode_wrappers[reqs] = self._wrappers.decode(reqs)
        return self._decode_wrappers.get(reqs, self._eager_wrapper)


def worst_case(tokens: int, reqs: int, max_context: int) -> Lengths:
    """`reqs` requests of the longest context, with the new `tokens` spread over them."""
    each, rest = divmod(tokens, reqs)
    return Lengths((max_context,) * reqs, (each + 1,) * rest + (each,) * (reqs - rest))
