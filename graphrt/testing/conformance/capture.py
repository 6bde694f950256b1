"""Capture and replay: the effect and the result of exactly one eager call, then no Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from graphrt.core.base.errors import (
    CaptureError,
    CaptureSealedError,
    FrozenMetadataError,
    StaleInputError,
)
from graphrt.core.batch.context import current_context, forward_context
from graphrt.core.capture.guard import eager_break
from graphrt.core.capture.wrapper import wrapper_class
from graphrt.core.device.contract import Capability
from graphrt.core.dispatch.reasons import Reason
from graphrt.core.replay.pool import GraphPool
from graphrt.core.runner.host import Host
from graphrt.testing.conformance.base import (
    D2,
    D4,
    FULL,
    NONE,
    PIECEWISE,
    ConformanceBase,
    Counting,
)


@dataclass
class Outputs:
    """A result whose tensors are nested in a data class and its dict."""

    hidden: torch.Tensor
    extra: dict[str, Any]


class CaptureConformance(ConformanceBase):
    def test_the_wrapper_class_names_this_platform(self) -> None:
        # Raises if it is another platform's class, whose own pools would be on that platform.
        assert wrapper_class(self.platform).platform_name == self.platform.name

    def test_replay_equals_eager_bit_for_bit_on_new_inputs(self, pool: GraphPool) -> None:
        weight = torch.linspace(-1, 1, 64).reshape(8, 8).to(self.platform.device_type)

        def forward(x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(torch.mm(x, weight) * 0.5 + x)

        wrapper = self.wrap(forward, FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        forward(x)  # Libraries such as cuBLAS are created at first use, which no capture allows.
        self.capture(wrapper, FULL, x)
        for scale in (0.3, -1.7, 5.0):
            x.copy_(self.tensor(1, 2, 3, 4) * scale)
            expected = self.host(forward(x))
            assert torch.equal(self.host(self.step(wrapper, FULL, x)), expected)

    def test_a_capturing_call_returns_what_one_eager_call_returns(self, pool: GraphPool) -> None:
        wrapper = self.wrap(lambda x: x * 2 + 1, FULL, pool)
        assert self.first(self.capture(wrapper, FULL, self.tensor(1, 2, 3, 4))) == [3, 5, 7, 9]

    @pytest.mark.parametrize("mode", [FULL, PIECEWISE])
    def test_a_capturing_call_advances_state_exactly_once(self, pool: GraphPool, mode: Any) -> None:
        counter = self.tensor(0)

        def forward(x: torch.Tensor) -> torch.Tensor:
            counter.add_(1)
            return x + counter

        wrapper = self.wrap(forward, mode, pool, breakable=True)
        x = self.tensor(1, 2, 3, 4)
        assert self.first(self.capture(wrapper, mode, x)) == [2, 3, 4, 5]
        assert self.first(counter) == [1]
        assert self.first(self.step(wrapper, mode, x)) == [3, 4, 5, 6]
        assert self.first(counter) == [2]

    def test_replay_does_not_run_the_python_of_the_forward(self, pool: GraphPool) -> None:
        forward = Counting(lambda x: x + 1)
        wrapper = self.wrap(forward, FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, FULL, x)
        self.step(wrapper, FULL, x)
        assert forward.calls == 1

    def test_without_context_or_in_another_mode_the_runnable_is_called(
        self, pool: GraphPool
    ) -> None:
        forward = Counting(lambda x: x + 1)
        wrapper = self.wrap(forward, FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, FULL, x)
        wrapper(x)
        self.step(wrapper, NONE, x)
        self.step(wrapper, PIECEWISE, x)
        assert forward.calls == 4
        assert wrapper.eager_calls[Reason.NO_CONTEXT] == 1

    def test_nested_containers_are_returned_with_their_structure(self, pool: GraphPool) -> None:
        def forward(x: torch.Tensor) -> Outputs:
            return Outputs(x + 1, {"pair": (x * 2, [x * 3, None, "text"])})

        wrapper = self.wrap(forward, FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, FULL, x)
        x.copy_(self.tensor(2, 3, 4, 5))
        out = self.step(wrapper, FULL, x)
        assert isinstance(out, Outputs)
        assert self.first(out.hidden) == [3, 4, 5, 6]
        assert self.first(out.extra["pair"][0]) == [4, 6, 8, 10]
        assert self.first(out.extra["pair"][1][0]) == [6, 9, 12, 15]
        assert out.extra["pair"][1][1:] == [None, "text"]

    def test_an_input_that_is_returned_stays_the_input(self, pool: GraphPool) -> None:
        wrapper = self.wrap(lambda x: (x, x + 1), FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, FULL, x)
        assert self.step(wrapper, FULL, x)[0] is x

    def test_successive_graphs_in_one_pool_all_replay(self, pool: GraphPool) -> None:
        wrapper = self.wrap(lambda x: (x + 1) * 2, FULL, pool)
        big, small = self.tensor(1, 2, 3, 4), self.tensor(5, 6)
        self.capture(wrapper, FULL, big, descriptor=D4, slot=0)
        self.capture(wrapper, FULL, small, descriptor=D2, slot=1)
        for _ in range(2):
            out = self.step(wrapper, FULL, big, descriptor=D4, slot=0)
            assert self.first(out) == [4, 6, 8, 10]
            out = self.step(wrapper, FULL, small, descriptor=D2, slot=1)
            assert self.first(out) == [12, 14]

    def test_an_entry_is_found_by_descriptor_when_the_slot_is_another_hosts(
        self, pool: GraphPool
    ) -> None:
        wrapper = self.wrap(lambda x: x + 1, FULL, pool)
        big, small = self.tensor(1, 2, 3, 4), self.tensor(5, 6)
        self.capture(wrapper, FULL, big, descriptor=D4, slot=0)
        self.capture(wrapper, FULL, small, descriptor=D2, slot=1)
        # Slot 0 is D4's here. A second dispatcher may give the same number to D2.
        assert self.first(self.step(wrapper, FULL, small, descriptor=D2, slot=0)) == [6, 7]

    def test_cleared_graphs_can_be_captured_again(self, pool: GraphPool) -> None:
        wrapper = self.wrap(lambda x: x + 1, FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, FULL, x)
        wrapper.clear_graphs()
        assert not wrapper.entries
        self.capture(wrapper, FULL, x)
        assert self.first(self.step(wrapper, FULL, x)) == [2, 3, 4, 5]

    def test_a_dropped_descriptor_runs_eagerly(self, pool: GraphPool) -> None:
        forward = Counting(lambda x: x + 1)
        wrapper = self.wrap(forward, FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, FULL, x, slot=0)
        wrapper.drop(D4)
        self.step(wrapper, FULL, x, slot=0)
        assert forward.calls == 2

    def test_a_full_wrapper_around_piecewise_ones_replays_in_both_modes(
        self, pool: GraphPool
    ) -> None:
        pieces = [self.wrap(lambda x: x + 1, PIECEWISE, pool) for _ in range(2)]

        def model(x: torch.Tensor) -> torch.Tensor:
            hidden = pieces[0](x)
            result: torch.Tensor = pieces[1](hidden * 1)
            return result

        def piecewise(x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = pieces[1](pieces[0](x))
            return result

        full = self.wrap(model, FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        self.capture(piecewise, PIECEWISE, x)
        self.capture(full, FULL, x)
        assert [len(w.entries) for w in (full, *pieces)] == [1, 1, 1]
        x.copy_(self.tensor(5, 6, 7, 8))
        assert self.first(self.step(full, FULL, x)) == [7, 8, 9, 10]
        assert self.first(self.step(piecewise, PIECEWISE, x)) == [7, 8, 9, 10]

    def test_a_sealed_wrapper_runs_unseen_descriptors_eagerly_and_counts(
        self, pool: GraphPool
    ) -> None:
        wrapper = self.wrap(lambda x: x + 1, FULL, pool, lazy=True)
        wrapper.seal()
        assert self.first(self.step(wrapper, FULL, self.tensor(1))) == [2]
        assert wrapper.eager_calls[Reason.SEALED] == 1
        assert not wrapper.entries

    def test_a_strict_sealed_wrapper_refuses_unseen_descriptors(self, pool: GraphPool) -> None:
        wrapper = self.wrap(lambda x: x + 1, FULL, pool, strict=True)
        wrapper.seal()
        with pytest.raises(CaptureSealedError, match="sizes="):
            self.step(wrapper, FULL, self.tensor(1))

    def test_lazy_capture_happens_only_where_it_was_asked_for(self, pool: GraphPool) -> None:
        x = self.tensor(1, 2, 3, 4)
        explicit = self.wrap(lambda x: x + 1, FULL, pool)
        self.step(explicit, FULL, x)
        lazy = self.wrap(lambda x: x + 1, FULL, pool, lazy=True)
        self.step(lazy, FULL, x)
        assert (len(explicit.entries), len(lazy.entries)) == (0, 1)

    def test_address_checks_name_the_argument_that_moved(self, pool: GraphPool) -> None:
        wrapper = self.wrap(lambda x: x + 1, FULL, pool, check="always")
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, FULL, x)
        self.step(wrapper, FULL, x)
        with pytest.raises(StaleInputError, match=r"\[0\]"):
            self.step(wrapper, FULL, self.tensor(1, 2, 3, 4))

    def test_a_wrapper_called_twice_in_its_capturing_step_is_an_error(
        self, pool: GraphPool
    ) -> None:
        wrapper = self.wrap(lambda x: x + 1, PIECEWISE, pool)
        with pytest.raises(CaptureError, match="called twice for one descriptor"):
            self.capture(lambda x: wrapper(wrapper(x)), PIECEWISE, self.tensor(1, 2, 3, 4))
        assert not wrapper.entries

    def test_random_operators_draw_fresh_numbers_at_every_replay(self, pool: GraphPool) -> None:
        self.need(Capability.RANDOM)
        wrapper = self.wrap(lambda x: x + torch.rand_like(x), FULL, pool)
        x = self.tensor(0, 0, 0, 0)
        self.capture(wrapper, FULL, x)
        first = self.host(self.step(wrapper, FULL, x))
        second = self.host(self.step(wrapper, FULL, x))
        assert not torch.equal(first, second)

    def test_attributes_and_unwrap_reach_the_runnable(self, pool: GraphPool) -> None:
        forward = Counting(lambda x: x + 1)
        wrapper = self.wrap(self.wrap(forward, PIECEWISE, pool), FULL, pool)
        assert wrapper.calls == 0
        assert wrapper.unwrap() is forward
        assert D4 not in wrapper.entries

    @pytest.mark.parametrize("mode", [FULL, PIECEWISE])
    def test_metadata_read_while_a_graph_is_captured_is_refused(
        self, mode: Any, pool: GraphPool
    ) -> None:
        def forward(x: torch.Tensor) -> torch.Tensor:
            context = current_context()
            assert context is not None
            return torch.mul(x, context.metadata)

        wrapper = self.wrap(forward, mode, pool, breakable=True)
        x = self.tensor(1, 2, 3, 4)
        with pytest.raises(FrozenMetadataError) as caught:
            self.capture(wrapper, mode, x, metadata=3.0)
        assert str(caught.value.source).endswith("return torch.mul(x, context.metadata)")
        assert not wrapper.entries
        with forward_context("NONE", D4, metadata=5.0):
            assert self.first(wrapper(x)) == [5, 10, 15, 20]

    def test_an_eager_part_reads_metadata_under_piecewise_and_not_under_full(self) -> None:
        @eager_break
        def part(x: torch.Tensor) -> torch.Tensor:
            context = current_context()
            assert context is not None
            return torch.mul(x, context.metadata or 1.0)

        def forward(x: torch.Tensor) -> torch.Tensor:
            return part(x + 1) + 1

        with self.runner_of(forward) as runner:
            runner.capture()
            assert self.first(runner(x=self.tensor(0, 1, 2, 3), metadata=10.0)) == [11, 21, 31, 41]
        with self.runner_of(forward, mode="FULL") as runner:
            with pytest.raises(FrozenMetadataError, match="in part: "):
                runner.capture()
            assert self.first(runner(x=self.tensor(0, 1, 2, 3), metadata=10.0)) == [11, 21, 31, 41]

    @pytest.mark.parametrize("outputs", [("tokens", 8), None])
    def test_metadata_that_is_declared_at_its_bound_may_be_read_by_a_graph(
        self, outputs: Any
    ) -> None:
        def forward(x: torch.Tensor) -> torch.Tensor:
            context = current_context()
            assert context is not None
            # A bound, such as the longest context: rounds beyond the live value add 0.
            return sum((x[:, :1] * 0 for _ in range(context.metadata)), x) + 1

        host = Host(metadata=lambda descriptor: descriptor.num_tokens * 2)
        with self.runner_of(forward, mode="FULL", host=host, outputs=outputs) as runner:
            runner.capture()
            assert self.first(runner(x=self.tensor(0, 1, 2, 3), metadata=3)) == [1, 2, 3, 4]
            assert self.first(runner(x=self.tensor(0, 1, 2), metadata=1)) == [1, 2, 3]

    def test_the_query_length_of_one_live_batch_is_nothing_that_a_graph_sees(
        self, pool: GraphPool
    ) -> None:
        seen: list[int | None] = []

        @eager_break
        def part(x: torch.Tensor) -> torch.Tensor:
            seen.append(query_len())
            return x * 2

        def query_len() -> int | None:
            context = current_context()
            assert context is not None
            return context.query_len

        def forward(x: torch.Tensor) -> torch.Tensor:
            seen.append(query_len())
            return part(x + 1) + 1

        wrapper = self.wrap(forward, PIECEWISE, pool, breakable=True, lazy=True)
        context = forward_context("PIECEWISE", D4, query_len=1)
        with context:
            wrapper(self.tensor(1, 2, 3, 4))
        assert seen == [None, 1]
        assert context.query_len == 1
