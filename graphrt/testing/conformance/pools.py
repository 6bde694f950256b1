"""Pools: one thread at a time, streams in order, shared handles, and errors once closed."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch

from graphrt.core.base.errors import (
    MissingCapabilityError,
    PoolBusyError,
    PoolClosedError,
    PoolError,
)
from graphrt.core.batch.context import carry_context, current_context
from graphrt.core.capture.guard import eager_break
from graphrt.core.capture.keyed import KeyedGraphs
from graphrt.core.device.contract import Capability
from graphrt.core.replay.pool import GraphPool
from graphrt.testing.conformance.base import D4, FULL, PIECEWISE, ConformanceBase


def in_thread(function: Any) -> Any:
    """Run `function` in a new thread; returns what it returned or raised."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(function())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return result[0]


class PoolConformance(ConformanceBase):
    def test_two_threads_in_one_pool_at_once_raise(self, pool: GraphPool) -> None:
        wrapper = self.wrap(lambda x: x + 1, FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, FULL, x)
        inside: list[Any] = []

        @eager_break
        def other_thread(y: torch.Tensor) -> torch.Tensor:
            inside.append(in_thread(lambda: self.step(wrapper, FULL, x)))
            return y * 1

        broken = self.wrap(lambda y: other_thread(y + 1), PIECEWISE, pool, breakable=True)
        self.capture(broken, PIECEWISE, x)
        self.step(broken, PIECEWISE, x)
        assert [type(error) for error in inside] == [PoolBusyError] * 2
        assert self.first(self.step(wrapper, FULL, x)) == [2, 3, 4, 5]

    def test_a_step_begun_between_two_pieces_of_another_thread_raises(
        self, pool: GraphPool
    ) -> None:
        wrapper = self.wrap(lambda x: x + 1, PIECEWISE, pool)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, PIECEWISE, x)
        errors: list[Any] = []

        def model(y: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = wrapper(y)
            errors.append(in_thread(lambda: self.step(wrapper, PIECEWISE, x)))
            return result

        self.step(model, PIECEWISE, x)
        assert isinstance(errors[0], PoolBusyError)
        assert "GraphPool of its own" in str(errors[0])

    def test_two_pools_in_two_threads_do_not_disturb_each_other(self, pool: GraphPool) -> None:
        errors: list[Any] = []

        def work(offset: float) -> None:
            pool = GraphPool(self.platform)
            wrapper = self.wrap(lambda x: x + offset, FULL, pool)
            x = self.tensor(1, 2, 3, 4)
            self.capture(wrapper, FULL, x)
            for value in range(50):
                x.copy_(self.tensor(value, value, value, value))
                out = self.step(wrapper, FULL, x)
                if self.first(out) != [value + offset] * 4:
                    errors.append((offset, value, self.first(out)))

        raised: list[Any] = []
        threads = [
            threading.Thread(target=lambda n=n: raised.append(in_thread(lambda: work(n))))
            for n in (1.0, 100.0)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert raised == [None, None]
        assert errors == []

    def test_context_reaches_a_new_thread_only_when_it_is_carried(self, pool: GraphPool) -> None:
        wrapper = self.wrap(lambda x: x + 1, FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, FULL, x)
        seen: list[Any] = []

        def model() -> None:
            seen.append(in_thread(current_context))
            seen.append(in_thread(carry_context(current_context)))

        self.step(model, FULL)
        assert seen[0] is None
        assert seen[1] is not None
        assert seen[1].descriptor == D4

    def test_a_closed_pool_says_so(self, pool: GraphPool) -> None:
        other = GraphPool(self.platform)
        wrapper = self.wrap(lambda x: x + 1, FULL, other)
        other.close()
        other.close()
        with pytest.raises(PoolClosedError, match="closed"):
            self.capture(wrapper, FULL, self.tensor(1, 2, 3, 4))

    def test_replays_from_two_streams_are_ordered(self, pool: GraphPool) -> None:
        self.need(Capability.STREAMS)
        wrapper = self.wrap(lambda x: x.add_(x) + 0, FULL, pool)
        x = self.tensor(1, 1, 1, 1)
        self.capture(wrapper, FULL, x)
        streams = [self.platform.new_stream() for _ in range(2)]
        for turn in range(6):
            with self.platform.on_stream(streams[turn % 2]):
                out = self.step(wrapper, FULL, x)
        assert self.first(out) == [128.0] * 4

    def test_two_pools_over_one_handle_share_its_memory_and_each_keeps_its_graphs(
        self, pool: GraphPool
    ) -> None:
        self.need(Capability.HOST_POOL)
        x = self.tensor(1, 2, 3, 4)
        first = self.wrap(lambda y: y + 1, FULL, pool)
        self.capture(first, FULL, x)
        other = GraphPool(self.platform, handle=pool.handle, stream=pool.stream)
        assert other.handle == pool.handle
        second = self.wrap(lambda y: y + 10, FULL, other)
        self.capture(second, FULL, x)
        assert pool.bytes() == other.bytes()
        assert self.first(self.step(first, FULL, x)) == [2, 3, 4, 5]
        assert self.first(self.step(second, FULL, x)) == [11, 12, 13, 14]
        pool.close()
        junk = [self.tensor(7, 7, 7, 7) for _ in range(32)]
        for value in (1.0, 2.0):
            x.copy_(self.tensor(value, value, value, value))
            assert self.first(self.step(second, FULL, x)) == [value + 10] * 4
            assert all(self.first(tensor) == [7] * 4 for tensor in junk)
        third = self.wrap(lambda y: y + 100, FULL, other)
        self.capture(third, FULL, x)
        assert self.first(self.step(third, FULL, x)) == [102] * 4
        other.close()

    def test_a_handle_that_was_shown_stays_when_all_graphs_are_gone(self, pool: GraphPool) -> None:
        self.need(Capability.HOST_POOL)
        handle, x = pool.handle, self.tensor(1, 2, 3, 4)
        wrapper = self.wrap(lambda y: y + 1, FULL, pool)
        for _ in range(3):
            self.capture(wrapper, FULL, x)
            assert self.first(self.step(wrapper, FULL, x)) == [2, 3, 4, 5]
            pool.clear_graphs()
            assert not wrapper.entries
            assert pool.handle == handle

    def test_a_platform_without_host_pools_says_so(self, pool: GraphPool) -> None:
        if Capability.HOST_POOL in self.platform.capabilities:
            pytest.skip(f"platform {self.platform.name} has HOST_POOL")
        with pytest.raises(MissingCapabilityError):
            _ = pool.handle

    def test_a_wrapper_without_graphs_moves_to_another_pool(self, pool: GraphPool) -> None:
        wrapper, x = self.wrap(lambda y: y + 1, FULL, pool), self.tensor(1, 2, 3, 4)
        self.capture(wrapper, FULL, x)
        other = GraphPool(self.platform)
        with pytest.raises(PoolError, match="clear_graphs"):
            wrapper.move_to(other)
        wrapper.clear_graphs()
        wrapper.move_to(other)
        self.capture(wrapper, FULL, x)
        pool.close()
        steps = other.generation
        assert self.first(self.step(wrapper, FULL, x)) == [2, 3, 4, 5]
        assert (len(wrapper.entries), other.generation - steps) == (1, 1)
        assert (pool.captures, other.captures) == (1, 1)
        other.close()
        assert not wrapper.entries

    def test_a_stream_of_the_hosts_is_captured_on(self, pool: GraphPool) -> None:
        self.need(Capability.STREAMS)
        stream, seen = self.platform.new_stream(), []

        def forward(x: torch.Tensor) -> torch.Tensor:
            seen.append(self.platform.current_stream_id())
            return x + 1

        wrapper, x = self.wrap(forward, FULL, pool), self.tensor(1, 2, 3, 4)
        with self.platform.on_stream(stream):
            expected = self.platform.current_stream_id()
            with pool.capture_session(stream=stream):
                self.capture(wrapper, FULL, x)
        assert seen == [expected]
        assert self.first(self.step(wrapper, FULL, x)) == [2, 3, 4, 5]

    def test_keyed_graphs_are_captured_now_and_replayed_by_key(self, pool: GraphPool) -> None:
        graphs, x = KeyedGraphs(pool), self.tensor(1, 2, 3, 4)
        keys: list[Any] = ["one", 2, ("three",)]
        for index, key in enumerate(keys):
            graphs.capture(key, partial(torch.add, x, index + 1))
        for value in (5.0, 6.0):
            x.copy_(self.tensor(value, value, value, value))
            for index, key in enumerate(keys):
                assert self.first(graphs.replay(key)) == [value + index + 1] * 4
                assert self.first(graphs[key].outputs) == [value + index + 1] * 4
