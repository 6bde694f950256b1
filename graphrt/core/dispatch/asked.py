"""What a dispatch is asked: a batch that is what it calls itself, and what narrows the choice."""

from __future__ import annotations

from collections.abc import Collection

from graphrt.core.base import (
    InvalidBatchError,
    InvalidModeError,
    count_of,
    items_of,
    padding_ratio,
    shown,
)
from graphrt.core.batch import (
    Batch,
    BatchDescriptor,
    GraphMode,
    checked_bounds,
    checked_count,
    checked_variant,
    plain_bounds,
)
from graphrt.core.dispatch.reasons import Agreed, Dispatch

NO_MODES: frozenset[GraphMode] = frozenset()
GRAPH_MODES = (GraphMode.FULL, GraphMode.PIECEWISE)
"""The modes of graphs, the better one first."""
_RUNTIME_MODES = frozenset(mode for mode in GraphMode if mode.is_runtime_mode)
_new_tuple = tuple.__new__
_NO_BOUNDS = Batch(1).bounds


def live_query_len(batch: Batch) -> int | None:
    """How many tokens each request has where that is one number."""
    tokens, reqs, query_len = batch[:3]
    if query_len is None or query_len < 1:
        return None
    if tokens % query_len if reqs is None else reqs * query_len != tokens:
        return None
    return query_len


def settled(batch: Batch) -> Batch:
    """A checked batch with its requests where they follow from the rest; without a query length
    that its counts contradict."""
    if batch.query_len is None:
        return batch
    query_len = live_query_len(batch)
    if query_len is None:
        return batch._replace(query_len=None)
    if batch.num_reqs is None:
        return batch._replace(num_reqs=batch.num_tokens // query_len)
    return batch


def unpadded(batch: Batch) -> BatchDescriptor:
    """The descriptor of a batch that no graph serves."""
    return named(settled(checked_batch(batch)))


def named(batch: Batch) -> BatchDescriptor:
    """The same of a batch that is checked and settled: by its own call all would be checked again,
    which takes as long as the dispatch."""
    tokens, reqs, query_len, bounds, loras, variant, _ = batch
    if reqs is not None and reqs < 1:
        reqs = None
    if loras < 0:
        loras = 0
    uniform, has_lora = query_len is not None, loras > 0
    return _new_tuple(
        BatchDescriptor, (tokens, reqs, uniform, has_lora, loras, query_len, bounds, variant)
    )


def checked_batch(batch: object) -> Batch:
    """`batch` with ints for its numbers; raises `InvalidBatchError` for what is none, or empty."""
    if not isinstance(batch, Batch):
        raise InvalidBatchError(
            "a step's batch is no Batch",
            got=type(batch).__name__,
            expected="a Batch, or nothing where the inputs' shapes say everything",
            advice="runner(Batch(num_tokens, num_reqs), input_ids=...): inputs are passed by name",
        )
    tokens, reqs, query_len, bounds, loras, variant, _ = batch
    if variant is not None and type(variant) is not str:
        checked_variant(variant)
    plain = (
        type(tokens) is int
        and (reqs is None or type(reqs) is int)
        and (query_len is None or type(query_len) is int)
        and type(loras) is int
        and (bounds is _NO_BOUNDS or plain_bounds(bounds))
    )
    if not plain:
        batch = batch._replace(
            num_tokens=count_of("num_tokens", tokens, error=InvalidBatchError),
            num_reqs=checked_count("num_reqs", reqs),
            query_len=checked_count("query_len", query_len),
            bounds=checked_bounds(bounds),
            num_active_loras=count_of("num_active_loras", loras, error=InvalidBatchError),
        )
    if batch.num_tokens < 1:
        raise InvalidBatchError(
            "a batch needs at least one token",
            got=batch.num_tokens,
            expected="num_tokens >= 1",
            advice="skip the step when nothing is scheduled"
            if batch.num_tokens == 0
            else "Batch(num_tokens) with the live tokens of the step",
        )
    return batch


def checked_modes(modes: Collection[GraphMode | str]) -> frozenset[GraphMode]:
    """The runtime modes in a collection; raises `InvalidModeError` for what is no set of them."""
    if modes.__class__ in (frozenset, set) and _RUNTIME_MODES.issuperset(modes):
        return frozenset(modes)
    if isinstance(modes, (str, GraphMode)) or not isinstance(modes, Collection):
        raise InvalidModeError(
            "modes are excluded as a set of them",
            got=shown(modes),
            expected="a set of runtime modes",
            advice="exclude=frozenset({GraphMode.FULL})",
        )
    what = "a step runs in no such mode to exclude"
    each = items_of("exclude", modes, "{GraphMode.FULL}", InvalidModeError)
    return frozenset([GraphMode.parse_runtime(mode, what) for mode in each])


def checked_agreed(agreed: Agreed) -> tuple[tuple[GraphMode, ...], BatchDescriptor]:
    """The modes that the agreed graph may have, and its descriptor; raises `InvalidBatchError`."""
    if isinstance(agreed, Dispatch):
        return (agreed.mode,), agreed.descriptor
    if isinstance(agreed, BatchDescriptor):
        return GRAPH_MODES, agreed
    raise InvalidBatchError(
        "ranks agree on a graph",
        got=shown(agreed),
        expected="its descriptor, or a Dispatch",
        advice="agreed=dispatcher.peek(batch) of the rank that decides",
    )


def checked_ratio(max_padding: float | None) -> float | None:
    """`max_padding` itself; raises `InvalidOptionError` unless it is None or at least 1."""
    if max_padding is not None:
        padding_ratio("max_padding", max_padding)
    return max_padding


def checked_key(
    mode: GraphMode | str, descriptor: BatchDescriptor
) -> tuple[GraphMode, BatchDescriptor]:
    """What names a graph.

    Raises `InvalidModeError` unless the mode is PIECEWISE or FULL, and `InvalidBatchError` for what
    is no descriptor.
    """
    mode = GraphMode.parse(mode)
    if mode not in GRAPH_MODES:
        raise InvalidModeError(
            "a graph is captured and served in one runtime mode",
            got=mode.name,
            expected="PIECEWISE or FULL",
            advice="pass the mode that the graph was captured in",
        )
    if not isinstance(descriptor, BatchDescriptor):
        raise InvalidBatchError(
            "a graph is named by its descriptor",
            got=shown(descriptor),
            expected="BatchDescriptor(num_tokens, num_reqs, ...)",
            advice="BatchDescriptor(num_tokens=4)",
        )
    return mode, descriptor
