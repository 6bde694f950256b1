"""Breakable capture: segments and eager parts run in order, and each reads the other's results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphrt.core.base.errors import (
    BakedScalarError,
    BreakError,
    RefusedOpError,
)
from graphrt.core.batch.context import current_context
from graphrt.core.capture.guard import eager_break
from graphrt.core.device.contract import Capability
from graphrt.core.replay.pool import GraphPool
from graphrt.testing.conformance.base import D2, FULL, PIECEWISE, ConformanceBase, Counting


@eager_break
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


_LIBRARY: Any = torch.library.Library("graphrt_conformance", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("attend(Tensor x, Tensor(a!) out) -> ()")


def _attend(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(doubled(x))


_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")


class BreakConformance(ConformanceBase):
    def breaking(self, function: Any) -> tuple[Counting, Any]:
        """`function` counted, and an eager break that calls it."""
        counted = Counting(function)
        return counted, eager_break(lambda *args: counted(*args))

    def test_an_eager_part_runs_once_at_capture_and_once_a_replay(self, pool: GraphPool) -> None:
        eager, attention = self.breaking(lambda x: x * 10)
        wrapper = self.wrap(lambda x: attention(x + 1) + 1, PIECEWISE, pool, breakable=True)
        x = self.tensor(1, 2, 3, 4)
        assert self.first(self.capture(wrapper, PIECEWISE, x)) == [21, 31, 41, 51]
        assert eager.calls == 1
        x.copy_(self.tensor(0, 1, 2, 3))
        assert self.first(self.step(wrapper, PIECEWISE, x)) == [11, 21, 31, 41]
        assert eager.calls == 2

    def test_under_full_nothing_breaks(self, pool: GraphPool) -> None:
        eager, attention = self.breaking(lambda x: x * 10)
        wrapper = self.wrap(lambda x: attention(x + 1) + 1, FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, FULL, x)
        assert self.first(self.step(wrapper, FULL, x)) == [21, 31, 41, 51]
        assert eager.calls == 1

    def test_segments_and_eager_parts_keep_their_order_over_many_breaks(
        self, pool: GraphPool
    ) -> None:
        _, attention = self.breaking(lambda x: x * 2)

        def forward(x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = attention(x + 1)
            return x + 0

        wrapper = self.wrap(forward, PIECEWISE, pool, breakable=True)
        x = self.tensor(0, 1, 2, 3)
        self.capture(wrapper, PIECEWISE, x)
        x.copy_(self.tensor(1, 2, 3, 4))
        expected = self.first(forward(x.clone()))
        assert self.first(self.step(wrapper, PIECEWISE, x)) == expected

    def test_an_eager_part_that_writes_a_captured_output_is_read_in_place(
        self, pool: GraphPool
    ) -> None:
        def write(x: torch.Tensor, out: torch.Tensor) -> None:
            out.copy_(x * 3)

        _, attention = self.breaking(write)

        def forward(x: torch.Tensor) -> torch.Tensor:
            hidden = x + 1
            out = torch.empty_like(hidden)
            attention(hidden, out)
            return out + 1

        wrapper = self.wrap(forward, PIECEWISE, pool, breakable=True)
        x = self.tensor(1, 2, 3, 4)
        assert self.first(self.capture(wrapper, PIECEWISE, x)) == [7, 10, 13, 16]
        x.copy_(self.tensor(0, 0, 1, 1))
        assert self.first(self.step(wrapper, PIECEWISE, x)) == [4, 4, 7, 7]

    def test_what_an_eager_part_reads_lives_until_then(self, pool: GraphPool) -> None:
        _, attention = self.breaking(lambda q, k: q + k)

        def forward(x: torch.Tensor) -> torch.Tensor:
            q, k = x * 2, x * 3
            mixed = attention(q, k)
            scratch = mixed * 7
            result: torch.Tensor = attention(scratch, k) + q
            return result

        wrapper = self.wrap(forward, PIECEWISE, pool, breakable=True)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, PIECEWISE, x)
        for value in (1.0, 2.0):
            x.copy_(self.tensor(1, 2, 3, 4) * value)
            expected = self.first(forward(x.clone()))
            assert self.first(self.step(wrapper, PIECEWISE, x)) == expected

    def test_a_view_that_an_eager_part_returns_keeps_its_block(self, pool: GraphPool) -> None:
        def in_place(out: torch.Tensor) -> torch.Tensor:
            out.add_(out)
            return out[:2]

        _, attention = self.breaking(in_place)

        def forward(x: torch.Tensor) -> torch.Tensor:
            kept = attention(x + 1)
            filler = x * 100
            result: torch.Tensor = kept + filler[:2] * 0
            return result

        wrapper = self.wrap(forward, PIECEWISE, pool, breakable=True)
        x = self.tensor(1, 2, 3, 4)
        assert self.first(self.capture(wrapper, PIECEWISE, x)) == [4, 6]
        assert self.first(self.step(wrapper, PIECEWISE, x)) == [4, 6]
        assert not wrapper._graphs.bridges._buffers

    def test_new_memory_where_an_argument_was_returned_is_an_error(self, pool: GraphPool) -> None:
        fresh = [False]
        _, attention = self.breaking(lambda x: x * 2 if fresh[0] else x)
        wrapper = self.wrap(lambda x: attention(x + 1) + 1, PIECEWISE, pool, breakable=True)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, PIECEWISE, x)
        assert self.first(self.step(wrapper, PIECEWISE, x)) == [3, 4, 5, 6]
        fresh[0] = True
        with pytest.raises(BreakError, match="argument"):
            self.step(wrapper, PIECEWISE, x)

    def test_two_results_that_share_memory_are_refused_where_one_is_written(
        self, pool: GraphPool
    ) -> None:
        def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            both = x * 2
            return both, both[2:]

        def forward(x: torch.Tensor) -> torch.Tensor:
            both: tuple[torch.Tensor, torch.Tensor] = attention(x + 1)
            both[0].add_(1)
            return both[1] * 1

        _, attention = self.breaking(twice)
        wrapper = self.wrap(forward, PIECEWISE, pool, breakable=True)
        with pytest.raises(BreakError, match="returned twice"):
            self.capture(wrapper, PIECEWISE, self.tensor(1, 2, 3, 4))

    def test_another_dtype_from_an_eager_part_is_an_error(self, pool: GraphPool) -> None:
        dtype = [torch.float32]
        _, attention = self.breaking(lambda x: (x * 2).view(dtype[0]))
        wrapper = self.wrap(
            lambda x: attention(x + 1).view(torch.float32) + 1, PIECEWISE, pool, breakable=True
        )
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, PIECEWISE, x)
        dtype[0] = torch.int32
        with pytest.raises(BreakError, match="int32"):
            self.step(wrapper, PIECEWISE, x)

    def test_a_bridge_that_a_larger_capture_outgrows_is_still_read(self, pool: GraphPool) -> None:
        _, attention = self.breaking(lambda x: x * 10)
        wrapper = self.wrap(lambda x: attention(x + 1) + 1, PIECEWISE, pool, breakable=True)
        big, small = self.tensor(1, 2, 3, 4), self.tensor(5, 6)
        self.capture(wrapper, PIECEWISE, small, descriptor=D2)
        self.capture(wrapper, PIECEWISE, big)
        for _ in range(2):
            out = self.step(wrapper, PIECEWISE, small, descriptor=D2)
            assert self.first(out) == [61, 71]
            assert self.first(self.step(wrapper, PIECEWISE, big)) == [21, 31, 41, 51]
        wrapper.clear_graphs()
        assert not wrapper._graphs.bridges._buffers

    def test_eager_parts_with_parameters_leave_no_autograd_graph_behind(
        self, pool: GraphPool
    ) -> None:
        weight = torch.nn.Parameter(self.tensor(1, 1, 1, 1))
        _, attention = self.breaking(lambda x: x * weight)
        wrapper = self.wrap(lambda x: attention(x + 1) + 1, PIECEWISE, pool, breakable=True)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, PIECEWISE, x)
        with torch.enable_grad():
            out = self.step(wrapper, PIECEWISE, x)
        assert not out.requires_grad
        (entry,) = wrapper.entries.values()
        assert not entry.parts[1].recorded.requires_grad  # type: ignore[attr-defined]
        assert self.first(out) == [3, 4, 5, 6]

    def test_smaller_captures_need_no_bridge_of_their_own(self, pool: GraphPool) -> None:
        _, attention = self.breaking(lambda x: x * 10)
        wrapper = self.wrap(lambda x: attention(x + 1) + 1, PIECEWISE, pool, breakable=True)
        big, small = self.tensor(1, 2, 3, 4), self.tensor(5, 6)
        self.capture(wrapper, PIECEWISE, big)
        self.capture(wrapper, PIECEWISE, small, descriptor=D2)
        pooled = Capability.ALLOCATE_IN_POOL in self.platform.capabilities
        assert len(wrapper._graphs.bridges._buffers) == (0 if pooled else 1)
        out = self.step(wrapper, PIECEWISE, small, descriptor=D2)
        assert self.first(out) == [61, 71]
        assert self.first(self.step(wrapper, PIECEWISE, big)) == [21, 31, 41, 51]

    def test_step_dependent_values_come_from_the_context(self, pool: GraphPool) -> None:
        def scaled(x: torch.Tensor) -> torch.Tensor:
            context = current_context()
            assert context is not None
            return torch.mul(x, context.metadata)

        wrapper = self.wrap(lambda x: eager_break(scaled)(x + 1), PIECEWISE, pool, breakable=True)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, PIECEWISE, x, metadata=1.0)
        assert self.first(self.step(wrapper, PIECEWISE, x, metadata=5.0)) == [10, 15, 20, 25]

    def test_another_shape_from_an_eager_part_is_an_error(self, pool: GraphPool) -> None:
        rows = [4]
        _, attention = self.breaking(lambda x: (x * 2)[: rows[0]])
        wrapper = self.wrap(lambda x: attention(x + 1) + 1, PIECEWISE, pool, breakable=True)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, PIECEWISE, x)
        rows[0] = 3
        with pytest.raises(BreakError, match=r"\(3, 8\)"):
            self.step(wrapper, PIECEWISE, x)
        rows[0] = 4
        assert self.first(self.step(wrapper, PIECEWISE, x)) == [5, 7, 9, 11]

    def test_another_python_value_from_an_eager_part_is_an_error(self, pool: GraphPool) -> None:
        lengths = [7]
        _, attention = self.breaking(lambda x: (x * 2, lengths[0]))
        wrapper = self.wrap(lambda x: attention(x + 1)[0] + 1, PIECEWISE, pool, breakable=True)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, PIECEWISE, x)
        self.step(wrapper, PIECEWISE, x)
        lengths[0] = 8
        with pytest.raises(BakedScalarError, match="8"):
            self.step(wrapper, PIECEWISE, x)

    def test_operators_of_the_list_break_without_a_decorator(self, pool: GraphPool) -> None:
        forward = Counting(lambda x: torch.sigmoid(x + 1) * 2)
        breaks = frozenset({"aten::sigmoid"})
        wrapper = self.wrap(forward, PIECEWISE, pool, breakable=True, breaks=breaks)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, PIECEWISE, x)
        (entry,) = wrapper.entries.values()
        assert len(entry.parts) == 3
        x.copy_(self.tensor(-1, 0, 1, 2))
        expected = self.host(torch.sigmoid(x + 1) * 2)
        assert torch.equal(self.host(self.step(wrapper, PIECEWISE, x)), expected)

    @pytest.mark.parametrize("listed", [False, True])
    def test_an_operator_whose_kernel_breaks_is_replayed(
        self, pool: GraphPool, listed: bool
    ) -> None:
        if self.notes_operators and not listed:
            pytest.skip("captures note operators, and replays run each as a whole")

        def forward(x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                out = torch.empty_like(x)
                torch.ops.graphrt_conformance.attend(x + 1, out)
                x = out - 1
            return x

        breaks = frozenset({"graphrt_conformance::attend"} if listed else ())
        wrapper = self.wrap(forward, PIECEWISE, pool, breakable=True, breaks=breaks)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, PIECEWISE, x)
        x.copy_(self.tensor(0, 1, 2, 3))
        expected = self.first(forward(x.clone()))
        assert self.first(self.step(wrapper, PIECEWISE, x)) == expected

    @pytest.mark.parametrize("check", ["off", "capture", "always"])
    @pytest.mark.parametrize("strict", [False, True])
    def test_an_eager_part_in_an_unbreakable_piece_is_an_error(
        self, pool: GraphPool, check: str, strict: bool
    ) -> None:
        eager, attention = self.breaking(lambda x: x * 10)
        wrapper = self.wrap(
            lambda x: attention(x + 1) + 1, PIECEWISE, pool, check=check, strict=strict
        )
        x = self.tensor(1, 2, 3, 4)
        with pytest.raises(RefusedOpError, match="breakable=True"):
            self.capture(wrapper, PIECEWISE, x)
        assert not wrapper.entries
        # Inside of another wrapper it runs: under FULL nothing breaks, and a breakable one breaks.
        whole = self.wrap(wrapper, FULL, pool)
        self.capture(whole, FULL, x)
        assert self.first(self.step(whole, FULL, x)) == [21, 31, 41, 51]
        calls = eager.calls
        pieces = self.wrap(wrapper, PIECEWISE, pool, breakable=True)
        self.capture(pieces, PIECEWISE, x, descriptor=D2)
        assert self.first(self.step(pieces, PIECEWISE, x, descriptor=D2)) == [21, 31, 41, 51]
        assert eager.calls == calls + 2

    def test_a_listed_operator_in_an_unbreakable_piece_is_an_error(self, pool: GraphPool) -> None:
        breaks = frozenset({"aten::sigmoid"})
        wrapper = self.wrap(lambda x: torch.sigmoid(x), PIECEWISE, pool, breaks=breaks)
        with pytest.raises(RefusedOpError, match="sigmoid"):
            self.capture(wrapper, PIECEWISE, self.tensor(1, 2, 3, 4))
        assert not wrapper.entries
