"""What dispatch has to find, by trying every graph; and what it is tried with."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from typing import NamedTuple

from hypothesis import strategies as st

from graphrt.core.batch.descriptor import Batch, BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.dispatch.reasons import Dispatch, Reason

FULL, PIECEWISE, NONE = GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.NONE
LEVEL = {NONE: 0, PIECEWISE: 1, FULL: 2}
Key = tuple[GraphMode, BatchDescriptor]


def inf_if_none(value: int | None) -> float:
    return math.inf if value is None else value


@st.composite
def descriptors(draw: st.DrawFn) -> BatchDescriptor:
    variant = draw(st.sampled_from([None, "draft"]))
    bounds = tuple(draw(st.lists(st.sampled_from([8, 64, 512]), max_size=2)))
    loras = draw(st.sampled_from([0, 0, 1, 4]))
    has_lora = bool(loras) or draw(st.booleans())
    if draw(st.booleans()):
        query_len = draw(st.integers(1, 4))
        reqs = draw(st.integers(1, 12))
        num_reqs = draw(st.sampled_from([None, reqs]))
        return BatchDescriptor(
            query_len * reqs, num_reqs, True, has_lora, loras, query_len, bounds, variant
        )
    tokens = draw(st.integers(1, 48))
    reqs = draw(st.none() | st.integers(1, tokens))
    return BatchDescriptor(tokens, reqs, False, has_lora, loras, None, bounds, variant)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    tokens = draw(st.integers(1, 60))
    return Batch(
        tokens,
        draw(st.none() | st.integers(1, tokens)),
        draw(st.none() | st.integers(1, 5)),
        tuple(draw(st.lists(st.integers(0, 600), max_size=3))),
        draw(st.integers(0, 5)),
        draw(st.sampled_from([None, "draft", "other"])),
        draw(st.frozensets(st.sampled_from([FULL, PIECEWISE, NONE]))),
    )


def normalised(batch: Batch) -> tuple[int | None, int | None]:
    """Requests and query length, as far as the batch's numbers agree with each other."""
    reqs, query_len = batch.num_reqs, batch.query_len
    if query_len is not None and reqs is None and batch.num_tokens % query_len == 0:
        return batch.num_tokens // query_len, query_len
    if query_len is not None and reqs is not None and reqs * query_len == batch.num_tokens:
        return reqs, query_len
    return reqs, None


def compatible(graph: BatchDescriptor, batch: Batch, max_num_reqs: int | None = None) -> bool:
    reqs, query_len = normalised(batch)
    most = graph.num_reqs or max_num_reqs
    capacity = graph.num_active_loras or (math.inf if graph.has_lora else 0)
    bounds_fit = all(
        place < len(batch.bounds) and batch.bounds[place] <= bound
        for place, bound in enumerate(graph.bounds)
    )
    return (
        graph.num_tokens >= batch.num_tokens
        and (most is None or reqs is None or most >= reqs)
        and (not graph.uniform or graph.query_len == query_len)
        and capacity >= batch.num_active_loras
        and graph.variant == batch.variant
        and bounds_fit
    )


def preference(mode: GraphMode, graph: BatchDescriptor) -> tuple[object, ...]:
    capacity = graph.num_active_loras or (math.inf if graph.has_lora else 0)
    bounds = (*graph.bounds, math.inf, math.inf)[:2]
    return (
        -LEVEL[mode],
        graph.num_tokens,
        capacity,
        not graph.uniform,
        bounds,
        inf_if_none(graph.num_reqs),
    )


class Limits(NamedTuple):
    """What a dispatch is limited to besides the batch; its names are those of the arguments."""

    exclude: frozenset[GraphMode] = frozenset()
    agreed: BatchDescriptor | Dispatch | None = None
    max_padding: float | None = None
    max_num_reqs: int | None = None


def is_agreed(key: Key, agreed: BatchDescriptor | Dispatch) -> bool:
    if isinstance(agreed, Dispatch):
        return key == (agreed.mode, agreed.descriptor)
    return key[1] == agreed


def able(keys: Collection[Key], batch: Batch, limits: Limits) -> list[Key]:
    """The graphs that may serve a batch; what ranks agreed on is padded to as far as need be."""
    most = math.inf
    if limits.max_padding is not None and limits.agreed is None:
        most = batch.num_tokens * limits.max_padding
    return [
        (mode, graph)
        for mode, graph in keys
        if compatible(graph, batch, limits.max_num_reqs)
        and mode not in limits.exclude | batch.exclude
        and (limits.agreed is None or is_agreed((mode, graph), limits.agreed))
        and graph.num_tokens <= most
    ]


def brute_force(keys: Collection[Key], batch: Batch, limits: Limits) -> tuple[object, ...] | None:
    """The preference of the best graph, or None."""
    return min((preference(*key) for key in able(keys, batch, limits)), default=None)


def reason_of(
    published: Collection[Key], planned: Collection[Key], batch: Batch, limits: Limits
) -> Reason:
    """Why a batch has the graph that it has, or none: the first of these that is true."""
    if able(published, batch, limits):
        return Reason.HIT
    if limits.agreed is not None:
        return Reason.RANKS_DISAGREE
    any_padding = limits._replace(max_padding=None)
    if able(published, batch, any_padding):
        return Reason.PADDING
    any_mode = Limits(max_num_reqs=limits.max_num_reqs)
    excluded = limits.exclude | batch.exclude
    whole = batch._replace(exclude=frozenset())
    if any(mode in excluded for mode, _ in able(published, whole, any_mode)):
        return Reason.EXCLUDED
    live = batch.num_tokens
    later = able(planned, batch, any_padding)
    if later:
        ratio = limits.max_padding
        fits = ratio is None or any(graph.num_tokens <= live * ratio for _, graph in later)
        return Reason.NOT_CAPTURED if fits else Reason.PADDING
    _, query_len = normalised(batch)
    kin = [graph for _, graph in [*published, *planned] if alike(graph, whole, query_len)]
    if kin and live > max(graph.num_tokens for graph in kin):
        return Reason.TOO_LARGE
    return Reason.NO_GRAPH


def alike(graph: BatchDescriptor, batch: Batch, query_len: int | None) -> bool:
    """Whether a batch of the same kind could have this graph if it had few enough tokens."""
    tokens = 1 if query_len is None else query_len
    smaller = batch._replace(num_tokens=tokens, num_reqs=None, query_len=query_len)
    return compatible(graph._replace(num_tokens=tokens * graph.num_tokens), smaller)


KEYS = st.tuples(st.sampled_from([FULL, PIECEWISE]), descriptors())


LIMITS = st.builds(
    Limits,
    st.frozensets(st.sampled_from([FULL, PIECEWISE, NONE])),
    st.none(),
    st.sampled_from([None, None, 1.0, 1.5, 3.0]),
)
"""Without what ranks agreed on: `agreeing` adds a graph."""


def agreeing(draw: random.Random, batch: Batch, limits: Limits, keys: Collection[Key]) -> Limits:
    """The same, or agreed on one of `keys`, as a rule one that can serve the batch, or on what
    another rank was told."""
    if not keys or draw.random() < 0.4:
        return limits
    fitting = able(keys, batch, Limits()) if draw.random() < 0.7 else []
    mode, graph = draw.choice(sorted(fitting or keys, key=repr))
    told = Dispatch(draw.choice([mode, mode, NONE]), graph, Reason.HIT, 99)
    return limits._replace(agreed=draw.choice([graph, told]))
