"""What an attention backend is to graphrt: a declared support and three methods."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch

from graphrt.attention.shapes import AttentionShape, check_tensors
from graphrt.core.base.errors import InvalidInputError
from graphrt.core.batch.context import current_context
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import AttentionSupport
from graphrt.core.capture.guard import eager_break
from graphrt.core.runner.host import Bind, Phase


class _Serial:
    """Unique to one step of attention."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True)
class AttentionStep:
    """The metadata of one step, the same for all layers of a backend.

    `block_table` [reqs, max_blocks] int32 or int64 holds the pages of each request in order, then
    any pages that exist. `context_lens` [reqs] int32 is how many tokens each has in the cache,
    those of this step included; 0 is a padding request. Token i of a request's q new ones sees the
    cache up to its own position, context_len - q + i. `query_len` is the number of tokens of every
    request, or None where they differ: request r has the tokens `query_start_loc[r]` to
    `query_start_loc[r + 1]` ([reqs + 1] int32). `max_context` is an upper bound of `context_lens`
    that is known on the host, and `prepared` has the backend's own data for the step.
    `serial` is unique to a call of `begin`: a replay has the one of the capture.
    """

    block_table: torch.Tensor
    context_lens: torch.Tensor
    query_len: int | None
    query_start_loc: torch.Tensor | None
    max_context: int
    prepared: Any = None
    serial: Any = field(default_factory=_Serial)


_begun: weakref.WeakKeyDictionary[object, tuple[object, AttentionStep]] = (
    weakref.WeakKeyDictionary()
)
"""Owner -> the token of a step, and the attention begun in it. As an attribute of a backend it
would be state of the model that changes with the live batch, and trials would refuse the model."""


def once_a_step(owner: object, begin: Callable[[], AttentionStep]) -> AttentionStep:
    """What `begin` returned at the first call for `owner` in this step. Outside of a step it is
    called every time."""
    context = current_context()
    if context is None or context.token is None:
        return begin()
    # Read once: another thread may replace it in between.
    last = _begun.get(owner)
    if last is None or last[0] is not context.token:
        _begun[owner] = last = context.token, begin()
    return last[1]


class AttentionBackend(abc.ABC):
    """Attention of layers of one shape over paged caches.

    A host calls `build` outside of the forward (as `GraphRunner(bind=)`), `begin` once in the
    forward and `attend` in each layer. A backend belongs to one runner, as its buffers are used by
    one step at a time.
    """

    name: ClassVar[str]

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape

    @abc.abstractmethod
    def get_cudagraph_support(self) -> AttentionSupport:
        """The widest kind of batch that a FULL graph of this backend serves."""

    def build(  # noqa: B027
        self, buffers: Mapping[str, torch.Tensor], descriptor: BatchDescriptor, phase: Phase
    ) -> None:
        """Put the metadata of a step that host code makes into persistent buffers.

        Called before every warm-up, capture, replay and eager step. At warm-up and capture it must
        be the worst case of `descriptor`. Backends that compute it on the device need none.
        """

    def begin(
        self,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        *,
        query_start_loc: torch.Tensor | None = None,
        query_len: int | None = None,
        max_context: int | None = None,
    ) -> AttentionStep:
        """Start a step, inside of the forward: all arguments as in `AttentionStep`.

        By default `query_len` is that of the context's descriptor, and `max_context` the first of
        its `bounds`, but no more than the block table holds. Raises `InvalidInputError`.
        """
        context = current_context()
        descriptor = None if context is None else context.descriptor
        if query_len is None and descriptor is not None and descriptor.uniform:
            query_len = descriptor.query_len
        if query_len is None and query_start_loc is None:
            raise InvalidInputError(
                "which tokens belong to which request is not known in this step of attention",
                got="neither query_len nor query_start_loc",
                expected="one of them, or the context of a uniform batch",
                advice="pass query_start_loc=",
            )
        if max_context is None and descriptor is not None and descriptor.bounds:
            max_context = descriptor.bounds[0]
        limit = block_table.shape[1] * self.shape.page_size
        return AttentionStep(
            block_table,
            context_lens,
            query_len,
            query_start_loc,
            limit if max_context is None else max(1, min(max_context, limit)),
        )

    def attend(
        self,
        step: AttentionStep,
        query: torch.Tensor,
        *caches: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from `query` to `caches`, which hold this step's tokens already: `out`.

        Shapes as of `shape`; rows of padding tokens become zeros or stay as they were. Under
        PIECEWISE it runs eagerly between two segments. Raises `InvalidInputError`.
        """
        check_tensors(self.shape, query, caches, out)
        if out is None:
            out = query.new_empty((*query.shape[:2], self.shape.value_dim))
        return _attend(self, step, query, caches, out)

    def decodes(self, query_len: int, reqs: int) -> bool:
        """Whether uniform batches of this size have a faster path than mixed ones."""
        return True

    def live_step(self, step: AttentionStep) -> AttentionStep:
        """The step for an eager part: `step`; but a decode step, begun once for all layers, if
        `step` is of a graph for mixed batches and the live batch is uniform.

        Only here the live batch counts: an eager run must issue the operators of the graph.
        """
        context = current_context()
        query_len = None if context is None else context.query_len
        if step.query_len is not None or query_len is None or context is None:
            return step
        reqs = len(step.context_lens)
        if not self.decodes(query_len, reqs):
            return step
        if context.descriptor is not None:
            # A graph of mixed batches may have more requests than tokens / query_len.
            reqs = min(reqs, context.descriptor.num_tokens // query_len)
        tables = step.block_table[:reqs], step.context_lens[:reqs]
        begin = partial(self.begin, *tables, query_len=query_len, max_context=step.max_context)
        return once_a_step(step.serial, begin)

    @abc.abstractmethod
    def run(
        self,
        step: AttentionStep,
        query: torch.Tensor,
        caches: tuple[torch.Tensor, ...],
        out: torch.Tensor,
    ) -> None:
        """Write the attention of `query` over `caches` to `out`."""


@eager_break
def _attend(
    backend: AttentionBackend,
    step: AttentionStep,
    query: torch.Tensor,
    caches: tuple[torch.Tensor, ...],
    out: torch.Tensor,
) -> torch.Tensor:
    step = backend.live_step(step)
    tokens = len(query) if step.query_len is None else step.query_len * len(step.context_lens)
    if tokens > len(query):
        raise InvalidInputError(
            "the query has fewer tokens than its requests",
            got=f"{len(query)} tokens",
            expected=f"{len(step.context_lens)} requests of {step.query_len} tokens",
            advice="give begin() the rows of this step's padded batch",
        )
    if tokens < len(query):
        out[tokens:].zero_()
    backend.run(step, query[:tokens], caches, out[:tokens])
    return out


def supports_of(*backends: AttentionBackend) -> dict[str, AttentionSupport]:
    """`attention=` of a runner: each backend's support by name, of which the lowest decides."""
    supports: dict[str, AttentionSupport] = {}
    for backend in backends:
        support = backend.get_cudagraph_support()
        supports[backend.name] = min(support, supports.get(backend.name, support))
    return supports


def bind_all(*backends: AttentionBackend, then: Bind | None = None) -> Bind:
    """`bind=` of a runner: the `build` of each backend, and `then` the host's own."""

    def bind(
        buffers: Mapping[str, torch.Tensor], descriptor: BatchDescriptor, phase: Phase
    ) -> None:
        for backend in backends:
            backend.build(buffers, descriptor, phase)
        if then is not None:
            then(buffers, descriptor, phase)

    return bind
