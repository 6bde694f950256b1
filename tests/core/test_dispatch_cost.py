"""The cost of a dispatch: function calls for any number of graphs, and bounded memory."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from graphrt import Batch, BatchDescriptor, GraphDispatcher, GraphMode, Reason

FULL, PIECEWISE, NONE = GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.NONE
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"num_active_loras": 4},
    {"bounds": (4096,)},
    {"variant": "draft"},
)


def ladder(sizes: int, kinds: tuple[dict[str, Any], ...] = KINDS) -> GraphDispatcher:
    """Graphs of 8, 16, ... tokens, for decode and mixed batches."""
    dispatcher = GraphDispatcher("FULL_AND_PIECEWISE")
    for kind in kinds:
        for size in range(8, 8 * sizes + 1, 8):
            dispatcher.publish(PIECEWISE, BatchDescriptor(size, **kind))
            dispatcher.publish(FULL, BatchDescriptor(size, size, True, query_len=1, **kind))
    return dispatcher


def calls_of(function: Callable[[], object]) -> int:
    """How many functions, of Python and of C, are called inside of one."""
    counted: list[str] = []

    def count(frame: object, event: str, arg: object) -> None:
        if event in ("call", "c_call"):
            counted.append(event)

    gc.disable()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
        gc.enable()
    # Neither the function itself nor the end of counting.
    return len(counted) - 2


ASKED = {
    "hit": (Batch(60, 60, 1), {}, Reason.HIT),
    "hit, mixed": (Batch(60, 3), {}, Reason.HIT),
    "hit, LoRAs": (Batch(60, 60, 1, num_active_loras=3), {}, Reason.HIT),
    "hit, bounds": (Batch(60, 60, 1, (4000,)), {}, Reason.HIT),
    "hit, variant": (Batch(60, 60, 1, variant="draft"), {}, Reason.HIT),
    "hit, excluded": (Batch(60, 60, 1, exclude=frozenset({FULL})), {}, Reason.HIT),
    "hit, agreed": (Batch(60, 60, 1), {"agreed": BatchDescriptor(72)}, Reason.HIT),
    "miss": (Batch(9000, 9000, 1), {}, Reason.TOO_LARGE),
    "miss, LoRAs": (Batch(60, 60, 1, num_active_loras=9), {}, Reason.NO_GRAPH),
    "miss, bounds": (Batch(9000, 60, None, (4000,)), {}, Reason.TOO_LARGE),
    "miss, variant": (Batch(60, 60, 1, variant="other"), {}, Reason.NO_GRAPH),
    "miss, excluded": (
        Batch(60, 60, 1, exclude=frozenset({FULL, PIECEWISE})),
        {},
        Reason.EXCLUDED,
    ),
    "miss, agreed": (Batch(60, 60, 1), {"agreed": BatchDescriptor(71)}, Reason.RANKS_DISAGREE),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("sizes", [10, 120])
def test_a_repeated_dispatch_makes_at_most_four_calls_for_any_number_of_graphs(sizes, asked):
    batch, limits, reason = ASKED[asked]
    dispatcher = ladder(sizes)
    assert dispatcher.dispatch(batch, **limits).reason is reason
    assert dispatcher.dispatch(batch, **limits).reason is reason
    # Of the lambda: dispatch; of dispatch: the look for what is remembered, and its key.
    assert calls_of(lambda: dispatcher.dispatch(batch, **limits)) <= 4


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("sizes", [10, 120])
def test_a_first_dispatch_of_a_known_batch_kind_makes_few_calls(sizes, asked):
    batch, limits, reason = ASKED[asked]
    dispatcher = ladder(sizes)
    dispatcher.dispatch(batch, **limits)
    reqs = None if batch.num_reqs is None else batch.num_reqs + 1
    other = batch._replace(num_tokens=batch.num_tokens + 1, num_reqs=reqs)
    # Two of them make the counter of a size that was not seen before.
    assert calls_of(lambda: dispatcher.dispatch(other, **limits)) <= 29
    assert dispatcher.dispatch(other, **limits).reason is reason


@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize("asked", [name for name in ASKED if name.startswith("hit")])
def test_a_repeated_hit_allocates_no_lasting_memory(asked):
    batch, limits, _ = ASKED[asked]
    dispatcher = ladder(10)
    identities = {id(dispatcher.dispatch(batch, **limits)) for _ in range(300)}
    assert len(identities) == 1
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(1000):
            dispatcher.dispatch(batch, **limits)
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(1000):
            dispatcher.dispatch(batch, **limits)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # An object that each hit kept would take 16 bytes or more; the runner of tests allocates too.
    assert after - before < 8 * 1000


def bounds_of_each(sizes: int) -> GraphDispatcher:
    """Graphs that have two bounds of their own each, so that there are as many kinds as batches."""
    dispatcher = GraphDispatcher("FULL_AND_PIECEWISE")
    for step in range(1, sizes + 1):
        bounds = (step * 64, (sizes - step) * 64)
        dispatcher.publish(PIECEWISE, BatchDescriptor(8 * step, bounds=bounds))
        dispatcher.publish(FULL, BatchDescriptor(8 * step, num_active_loras=step, bounds=bounds))
    return dispatcher


@pytest.mark.parametrize("make", [ladder, bounds_of_each])
def test_remembered_dispatches_take_less_than_a_mebibyte_for_any_batches(make):
    dispatcher, excluded = make(100), frozenset({FULL})
    tracemalloc.start()
    try:
        most = 0
        for step in range(6000):
            batch = Batch(
                step % 900 + 1,
                step % 7 + 1 if step % 2 else None,
                (None, 1, 2, step)[step % 4],
                ((), (step * 50,), (step * 3, step * 7))[step % 3],
                step % 11,
                (None, "draft", (f"other {step}",) * 100)[step % 3],
            )
            dispatcher.dispatch(batch)
            without = batch._replace(exclude=excluded)
            dispatcher.dispatch(without, agreed=BatchDescriptor(step + 1))
            dispatcher.dispatch(without)
            if step % 500 == 0:
                most = max(most, tracemalloc.get_traced_memory()[0])
        most = max(most, tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert most < 1 << 20
