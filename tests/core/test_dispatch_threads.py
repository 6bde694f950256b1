"""Threads dispatch while another publishes and withdraws graphs; no thread uses a stale index."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from graphrt import Batch, BatchDescriptor, GraphDispatcher, GraphMode, Reason
from graphrt.core.dispatch import dispatcher as dispatcher_module
from graphrt.core.dispatch.dispatcher import REMEMBERED

FULL = GraphMode.FULL
SIZES = tuple(range(1, 13))
CHANGES = 1000


@pytest.fixture
def many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("agreed", [False, True])
def test_a_dispatch_made_during_a_publish_is_forgotten_after_the_publish(agreed):
    told, publishing = {}, []
    limits = {"agreed": BatchDescriptor(8)} if agreed else {}

    class Slow(GraphDispatcher):
        """After a publish's new version, and before its graph, another thread looks up."""

        @property
        def version(self) -> object:
            return self._kept

        @version.setter
        def version(self, value: object) -> None:
            self._kept = value
            if threading.current_thread() in publishing:
                other = threading.Thread(
                    target=lambda: told.update(during=self.dispatch(Batch(5), **limits))
                )
                other.start()
                other.join(0.2)

    dispatcher = Slow("FULL")
    dispatcher.publish(FULL, BatchDescriptor(2))
    dispatcher.reserve(FULL, BatchDescriptor(8))
    publishing.append(threading.Thread(target=dispatcher.publish, args=(FULL, BatchDescriptor(8))))
    publishing[0].start()
    publishing[0].join()
    assert dispatcher.dispatch(Batch(5), **limits).reason is Reason.HIT


def test_a_missed_batch_is_dispatched_anew_after_a_publish():
    dispatcher = GraphDispatcher("FULL")
    for size, reason in ((2, Reason.TOO_LARGE), (4, Reason.TOO_LARGE), (8, Reason.HIT)):
        dispatcher.publish(FULL, BatchDescriptor(size))
        for _ in range(3):
            assert dispatcher.dispatch(Batch(8)).reason is reason
            exactly = Reason.RANKS_DISAGREE if reason is not Reason.HIT else reason
            agreed = BatchDescriptor(8)
            assert dispatcher.dispatch(Batch(8), agreed=agreed).reason is exactly
    dispatcher.reserve(FULL, BatchDescriptor(16))
    for _ in range(3):
        assert dispatcher.dispatch(Batch(12)).reason is Reason.NOT_CAPTURED
    dispatcher.withdraw(FULL, BatchDescriptor(8))
    assert dispatcher.dispatch(Batch(8)).reason is Reason.NOT_CAPTURED


class Published:
    """What is published, as far as another thread can know."""

    def __init__(self) -> None:
        self.sure: frozenset[int] = frozenset()
        self.perhaps: frozenset[int] = frozenset()
        self.changes = 0

    def change(self, sure: frozenset[int], perhaps: frozenset[int]) -> None:
        self.changes += 1
        self.sure, self.perhaps = sure, perhaps
        self.changes += 1


def best(sizes: frozenset[int], tokens: int) -> int | None:
    return min((size for size in sizes if size >= tokens), default=None)


@pytest.mark.usefixtures("many_switches")
@pytest.mark.parametrize("remembered", [REMEMBERED, 3])
@pytest.mark.parametrize("exclude", [frozenset(), frozenset({GraphMode.PIECEWISE})])
def test_threads_dispatch_only_published_graphs_while_another_thread_publishes_and_withdraws(
    exclude, remembered, monkeypatch
):
    monkeypatch.setattr(dispatcher_module, "REMEMBERED", remembered)
    dispatcher = GraphDispatcher("FULL")
    known, wrong, done = Published(), [], threading.Event()

    def publish_and_withdraw() -> None:
        drawn = random.Random(3)
        for _ in range(CHANGES):
            if wrong:
                break
            size = drawn.choice(SIZES)
            before = known.sure
            if size in before:
                known.change(before - {size}, before)
                dispatcher.withdraw(FULL, BatchDescriptor(size))
            else:
                known.change(before, before | {size})
                dispatcher.publish("full", BatchDescriptor(size))
            after = before ^ {size}
            known.change(after, after)
            seen(dispatcher.dispatch(Batch(size, exclude=exclude)), size, {best(after, size)})
        done.set()

    def seen(chosen: Any, tokens: int, allowed: set[int | None]) -> None:
        size = chosen.descriptor.num_tokens if chosen.reason is Reason.HIT else None
        if size not in allowed:
            wrong.append((tokens, size, allowed))

    def dispatch(seed: int) -> None:
        drawn = random.Random(seed)
        while not done.is_set():
            tokens = drawn.choice(SIZES)
            changes, sure, perhaps = known.changes, known.sure, known.perhaps
            chosen = dispatcher.dispatch(Batch(tokens, exclude=exclude))
            if changes == known.changes and not changes % 2:
                seen(chosen, tokens, {best(sure, tokens), best(perhaps, tokens)})

    def guarded(target: Any, *args: Any) -> None:
        try:
            target(*args)
        except BaseException as error:
            wrong.append(error)
            done.set()

    threads = [threading.Thread(target=guarded, args=(dispatch, seed)) for seed in range(3)]
    threads.append(threading.Thread(target=guarded, args=(publish_and_withdraw,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.usefixtures("many_switches")
def test_threads_that_reserve_concurrently_get_the_same_slot_for_each_graph():
    dispatcher = GraphDispatcher("FULL")
    slots: list[list[int]] = []

    def reserve() -> None:
        slots.append([dispatcher.reserve(FULL, BatchDescriptor(size)) for size in range(1, 200)])

    threads = [threading.Thread(target=reserve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert slots == [slots[0]] * 4 and len(set(slots[0])) == 199
    assert len(dispatcher.hits()) == 199
