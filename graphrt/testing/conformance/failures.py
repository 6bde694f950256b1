"""Failed captures: everything is rolled back, and the next call works."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from graphrt.core.base.errors import CaptureError, RefusedOpError
from graphrt.core.batch.context import current_context
from graphrt.core.capture.guard import eager_break
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.recording import current_capture
from graphrt.testing.conformance.base import FULL, PIECEWISE, ConformanceBase


class Boom(Exception):
    """The error of a forward that fails on purpose."""


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
        with pytest.raises(Boom, match="in the forward"):
            self.capture(wrapper, mode, x)
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
        with pytest.raises(Boom, match="in the eager part"):
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
        with pytest.raises((CaptureError, RuntimeError)):
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
        with pytest.raises(Boom, match="third"):
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

        with pytest.raises(Boom):
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

    @pytest.mark.parametrize("mode", [FULL, PIECEWISE])
    @pytest.mark.parametrize("change", ["unsqueeze_", "t_", "resize_"])
    def test_a_tensor_of_the_caller_that_gets_another_shape_is_refused(
        self, pool: GraphPool, mode: Any, change: str
    ) -> None:
        x = self.tensor(1, 2, 3)
        arguments = {"unsqueeze_": (0,), "t_": (), "resize_": (8, 3)}[change]

        def forward(x: torch.Tensor) -> torch.Tensor:
            getattr(x, change)(*arguments)
            return x * 2

        wrapper = self.wrap(forward, mode, pool, breakable=mode is PIECEWISE)
        with pytest.raises(RefusedOpError, match=r"the shape or the memory"):
            self.capture(wrapper, mode, x)
        self.check_usable(pool)

    def test_numbers_of_the_host_are_not_frozen_into_a_graph(self, pool: GraphPool) -> None:
        if self.platform.device_type == "cpu":
            pytest.skip("this platform is the host")

        def drawing(x: torch.Tensor) -> torch.Tensor:
            return x * torch.rand(()).item()

        def reading(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return x * scale.view(())

        def writing(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            out.add_(1)
            return x + 1

        x = self.tensor(1, 2, 3, 4)
        with pytest.raises(RefusedOpError, match="drawn on the host"):
            self.capture(self.wrap(drawing, FULL, pool), FULL, x)
        for forward in (reading, writing):
            with pytest.raises(RefusedOpError, match="is a tensor on the host"):
                self.capture(self.wrap(forward, FULL, pool), FULL, x, torch.ones(1))
        self.check_usable(pool)

    @pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
    @pytest.mark.parametrize("least", [2, 4])
    def test_a_runner_whose_forward_draws_on_the_host_is_not_captured(
        self, mode: str, least: int
    ) -> None:
        """Whether a forward draws is learnt in the warm-up of each size: a capture watches its
        operators for draws only if the warm-up drew."""
        if self.platform.device_type == "cpu":
            pytest.skip("this platform is the host")

        def forward(x: torch.Tensor) -> torch.Tensor:
            return x * torch.rand(()).item() if len(x) <= least else x + 1

        with self.runner_of(forward, mode=mode, sizes=[2, 4]) as runner:
            with pytest.raises(RefusedOpError, match="drawn on the host"):
                runner.capture()
            served = [graph.descriptor.num_tokens for graph in runner.report().graphs]
            assert served == ([] if least == 4 else [4])

    def test_pinned_memory_of_the_host_is_copied_at_every_replay(self, pool: GraphPool) -> None:
        if self.platform.device_type == "cpu":
            pytest.skip("this platform is the host")
        x, pinned = self.tensor(1, 2, 3, 4), torch.ones(4, 8).pin_memory()
        if not pinned.is_pinned():
            pytest.skip("no memory can be pinned here")

        def forward(x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
            return x + more.to(x.device, non_blocking=True)

        wrapper = self.wrap(forward, FULL, pool)
        self.capture(wrapper, FULL, x, pinned)
        pinned.fill_(10)
        assert self.first(self.step(wrapper, FULL, x, pinned)) == [11, 12, 13, 14]

    def test_eager_parts_draw_on_the_host_and_read_its_tensors(self, pool: GraphPool) -> None:
        drawn: list[float] = []

        @eager_break
        def draw(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            drawn.append(torch.rand(()).item())
            return x * float(scale)

        wrapper = self.wrap(lambda x, s: draw(x + 1, s) + 1, PIECEWISE, pool, breakable=True)
        x, scale = self.tensor(1, 2, 3, 4), torch.tensor(2.0)
        self.capture(wrapper, PIECEWISE, x, scale)
        scale.fill_(3.0)
        assert self.first(self.step(wrapper, PIECEWISE, x, scale)) == [7, 10, 13, 16]
        assert len(set(drawn)) == 2
