"""Lifetimes of outputs: which memory a replay overwrites, and which it must not."""

from __future__ import annotations

import pytest
import torch

from graphrt.core.device.contract import Capability
from graphrt.core.replay.pool import GraphPool
from graphrt.testing.conformance.base import D2, D4, FULL, PIECEWISE, ConformanceBase


class LifetimeConformance(ConformanceBase):
    def test_a_dropped_output_is_memory_for_the_next_graph(self, pool: GraphPool) -> None:
        self.need(Capability.SHARED_POOL)
        wrapper = self.wrap(lambda x: x + 1, FULL, pool)
        x, y = self.tensor(1, 2, 3, 4), self.tensor(5, 6, 7, 8)
        other = D4.__class__(4, variant="other")
        self.capture(wrapper, FULL, x, descriptor=D4)
        self.capture(wrapper, FULL, y, descriptor=other)
        first = self.step(wrapper, FULL, x, descriptor=D4)
        assert self.first(first) == [2, 3, 4, 5]
        second = self.step(wrapper, FULL, y, descriptor=other)
        assert first.data_ptr() == second.data_ptr()
        assert self.first(first) == [6, 7, 8, 9]

    def test_a_result_that_the_caller_holds_is_not_memory_for_the_next_graph(
        self, pool: GraphPool
    ) -> None:
        wrapper = self.wrap(lambda x: x + 1, FULL, pool)
        x, y = self.tensor(1, 2, 3, 4), self.tensor(5, 6, 7, 8)
        held = self.capture(wrapper, FULL, x, descriptor=D4)
        other = D4.__class__(4, variant="other")
        self.capture(wrapper, FULL, y, descriptor=other)
        self.step(wrapper, FULL, y, descriptor=other)
        assert self.first(held) == [2, 3, 4, 5]

    def test_cloned_outputs_outlive_later_steps(self, pool: GraphPool) -> None:
        wrapper = self.wrap(lambda x: x + 1, FULL, pool, outputs="clone")
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, FULL, x)
        kept = self.step(wrapper, FULL, x)
        x.copy_(self.tensor(5, 6, 7, 8))
        self.step(wrapper, FULL, x)
        assert self.first(kept) == [2, 3, 4, 5]

    def test_static_outputs_share_one_buffer_that_other_graphs_leave_alone(
        self, pool: GraphPool
    ) -> None:
        wrapper = self.wrap(lambda x: x + 1, FULL, pool, outputs="static")
        other = self.wrap(lambda x: x * 100, FULL, pool)
        big, small = self.tensor(1, 2, 3, 4), self.tensor(5, 6)
        self.capture(wrapper, FULL, big)
        self.capture(wrapper, FULL, small, descriptor=D2)
        self.capture(other, FULL, big)
        first = self.step(wrapper, FULL, big)
        self.step(other, FULL, big)
        assert self.first(first) == [2, 3, 4, 5]
        second = self.step(wrapper, FULL, small, descriptor=D2)
        assert second.data_ptr() == first.data_ptr()
        assert self.first(second) == [6, 7]

    def test_a_pieces_output_lives_until_its_last_reader(self, pool: GraphPool) -> None:
        pieces = [
            self.wrap(lambda x: x + 1, PIECEWISE, pool),
            self.wrap(lambda x: x * 2, PIECEWISE, pool),
            self.wrap(lambda x, y: x + y, PIECEWISE, pool),
        ]

        def model(x: torch.Tensor) -> torch.Tensor:
            first = pieces[0](x)
            second = pieces[1](first)
            result: torch.Tensor = pieces[2](first, second)
            return result

        x = self.tensor(1, 2, 3, 4)
        self.capture(model, PIECEWISE, x)
        x.copy_(self.tensor(2, 3, 4, 5))
        assert self.first(self.step(model, PIECEWISE, x)) == [9, 12, 15, 18]

    def test_the_generation_counts_steps_not_pieces(self, pool: GraphPool) -> None:
        pieces = [self.wrap(lambda x: x + 1, PIECEWISE, pool) for _ in range(3)]

        def model(x: torch.Tensor) -> torch.Tensor:
            for piece in pieces:
                x = piece(x)
            return x

        x = self.tensor(1, 2, 3, 4)
        self.capture(model, PIECEWISE, x)
        before = pool.generation
        self.step(model, PIECEWISE, x)
        self.step(model, PIECEWISE, x)
        assert pool.generation == before + 2
        full = self.wrap(lambda x: x + 1, FULL, pool)
        self.capture(full, FULL, x)
        before = pool.generation
        self.step(full, FULL, x)
        assert pool.generation == before + 1

    @pytest.mark.parametrize(
        "dtype",
        [
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.int32,
            torch.int64,
            torch.uint8,
            torch.bool,
            torch.float8_e4m3fn,
        ],
        ids=str,
    )
    def test_outputs_of_every_dtype_are_replayed(self, pool: GraphPool, dtype: torch.dtype) -> None:
        wrapper = self.wrap(lambda x: (x + 0).view(dtype), FULL, pool)
        x = torch.zeros(4, 8, dtype=torch.int32)
        x += torch.tensor([0, 1, 256, 65536], dtype=torch.int32).unsqueeze(1)
        device = x.to(self.platform.device_type)
        self.capture(wrapper, FULL, device)
        out = self.step(wrapper, FULL, device)
        assert out.dtype is dtype
        assert torch.equal(self.host(out).view(torch.uint8), x.view(torch.uint8))

    def test_strides_of_outputs_are_those_of_eager(self, pool: GraphPool) -> None:
        def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return (x + 1).t(), (x * 2)[:, ::2]

        wrapper = self.wrap(forward, FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, FULL, x)
        for eager, replayed in zip(forward(x), self.step(wrapper, FULL, x), strict=True):
            assert replayed.stride() == eager.stride()
            assert torch.equal(self.host(replayed), self.host(eager))
