"""Failed captures: everything is rolled back, and the next call works."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from graphrt.core.base import CaptureError
from graphrt.core.batch import current_context
from graphrt.core.capture import eager_break
from graphrt.core.replay import GraphPool, current_capture
from graphrt.testing.conformance.base import FULL, PIECEWISE, ConformanceBase


class Boom(Exception):
    pass


class FailureConformance(ConformanceBase):
    def check_usable(self, pool: GraphPool) -> None:
        """Nothing stays behind, and the pool captures and replays."""
        assert current_capture() is None
        assert current_context() is None
        assert pool.owner is None
        wrapper = self.wrap(lambda x: x + 1, FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, FULL, x)
        x.copy_(self.tensor(5, 6, 7, 8))
        assert self.first(self.step(wrapper, FULL, x)) == [6, 7, 8, 9]

    def test_a_collection_in_the_forward_does_not_end_the_capture(self, pool: GraphPool) -> None:
        x = self.tensor(1, 2, 3, 4)
        enabled = gc.isenabled()
        gc.disable()
        try:
            for _ in range(3):
                wrapper = self.wrap(lambda x: x + 1, FULL, GraphPool(self.platform))
                self.capture(wrapper, FULL, x)
                garbage: list[Any] = [wrapper]
                garbage.append(garbage)

            def forward(x: torch.Tensor) -> torch.Tensor:
                gc.collect()
                return x * 2

            wrapper = self.wrap(forward, FULL, pool)
            self.capture(wrapper, FULL, x)
        finally:
            if enabled:
                gc.enable()
        x.copy_(self.tensor(5, 6, 7, 8))
        assert self.first(self.step(wrapper, FULL, x)) == [10, 12, 14, 16]
        gc.collect()
        self.check_usable(pool)

    @pytest.mark.parametrize("mode", [FULL, PIECEWISE])
    def test_an_exception_in_the_forward_leaves_the_pool_usable(
        self, pool: GraphPool, mode: Any
    ) -> None:
        fail = [True]

        def forward(x: torch.Tensor) -> torch.Tensor:
            hidden = x + 1
            if fail[0]:
                raise Boom("in the forward")
            return hidden * 2

        wrapper = self.wrap(forward, mode, pool, breakable=True)
        x = self.tensor(1, 2, 3, 4)
        stream = self.platform.current_stream_id()
        with pytest.raises(CaptureError, match="in the forward") as caught:
            self.capture(wrapper, mode, x)
        assert isinstance(caught.value.__cause__, Boom)
        assert self.platform.current_stream_id() == stream
        assert not wrapper.entries
        self.check_usable(pool)
        fail[0] = False
        self.capture(wrapper, mode, x)
        assert self.first(self.step(wrapper, mode, x)) == [4, 6, 8, 10]

    def test_a_host_read_is_refused_and_leaves_the_pool_usable(self, pool: GraphPool) -> None:
        wrapper = self.wrap(lambda x: x * float((x + 1)[0, 0].item()), FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        with pytest.raises(CaptureError):
            self.capture(wrapper, FULL, x)
        assert not wrapper.entries
        self.check_usable(pool)

    def test_an_exception_in_an_eager_part_leaves_the_pool_usable(self, pool: GraphPool) -> None:
        @eager_break
        def failing(x: torch.Tensor) -> torch.Tensor:
            raise Boom("in the eager part")

        wrapper = self.wrap(lambda x: failing(x + 1) + 1, PIECEWISE, pool, breakable=True)
        with pytest.raises(CaptureError, match="in the eager part"):
            self.capture(wrapper, PIECEWISE, self.tensor(1, 2, 3, 4))
        assert not wrapper.entries
        self.check_usable(pool)

    def test_an_exception_in_a_listed_operator_leaves_the_pool_usable(
        self, pool: GraphPool
    ) -> None:
        breaks = frozenset({"aten::mm"})
        wrapper = self.wrap(
            lambda x: torch.mm(x + 1, x[:3]), PIECEWISE, pool, breakable=True, breaks=breaks
        )
        with pytest.raises(CaptureError):
            self.capture(wrapper, PIECEWISE, self.tensor(1, 2, 3, 4))
        assert not wrapper.entries
        self.check_usable(pool)

    def test_a_failure_in_the_third_of_five_pieces_rolls_back_all(self, pool: GraphPool) -> None:
        fail = [True]

        def third(x: torch.Tensor) -> torch.Tensor:
            if fail[0]:
                raise Boom("in the third piece")
            return x + 1

        functions = [lambda x: x + 1] * 2 + [third] + [lambda x: x + 1] * 2
        pieces = [self.wrap(function, PIECEWISE, pool) for function in functions]

        def model(x: torch.Tensor) -> torch.Tensor:
            for piece in pieces:
                x = piece(x)
            return x

        x = self.tensor(1, 2, 3, 4)
        with pytest.raises(CaptureError, match="third"):
            self.capture(model, PIECEWISE, x)
        assert [len(piece.entries) for piece in pieces] == [0] * 5
        self.check_usable(pool)
        fail[0] = False
        self.capture(model, PIECEWISE, x)
        assert self.first(self.step(model, PIECEWISE, x)) == [6, 7, 8, 9]

    def test_a_failed_capture_leaves_other_graphs_of_the_pool_alone(self, pool: GraphPool) -> None:
        good = self.wrap(lambda x: x + 1, FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        self.capture(good, FULL, x)

        def failing(x: torch.Tensor) -> torch.Tensor:
            x.mul(3)
            raise Boom("later")

        with pytest.raises(CaptureError):
            self.capture(self.wrap(failing, FULL, pool), FULL, x)
        assert self.first(self.step(good, FULL, x)) == [2, 3, 4, 5]

    def test_a_wrapper_inside_an_open_segment_becomes_part_of_it(self, pool: GraphPool) -> None:
        inner = self.wrap(lambda x: x + 1, FULL, pool)
        outer = self.wrap(lambda x: inner(x) * 2, FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        assert self.first(self.capture(outer, FULL, x)) == [4, 6, 8, 10]
        assert not inner.entries
        x += 1
        assert self.first(self.step(outer, FULL, x)) == [6, 8, 10, 12]
        self.check_usable(pool)
