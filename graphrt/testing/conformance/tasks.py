"""Updatable tasks: one call on every device, validated before anything is launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphrt.core.base.errors import GraphRTError, InvalidUpdateError, MissingUpdateError
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.device.contract import Capability
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.tasks import UNCHANGED, HostArg, UpdatableTask
from graphrt.testing.conformance.base import FULL, PIECEWISE, ConformanceBase, Counting

DESCRIPTOR = BatchDescriptor(4, 4)


def issue_scaled_sum(x: torch.Tensor, out: torch.Tensor, *, lengths: list[int]) -> None:
    """out = x + x * sum(lengths): the host argument is a scalar of the operator."""
    torch.add(x, x, alpha=sum(lengths), out=out)


class TaskConformance(ConformanceBase):
    """Most tests capture `two_layers`, each of which turns x into x * (1 + sum(lengths)) + 1."""

    def task(self) -> UpdatableTask:
        """A task whose result is x * (1 + sum(lengths)). Override it if the device's `add` cannot
        change `alpha` in a captured graph."""
        return UpdatableTask(
            "attention",
            issue_scaled_sum,
            {"lengths": HostArg("reqs", "zero")},
            at_capture=lambda descriptor: {"lengths": [0] * (descriptor.num_reqs or 1)},
        )

    def two_layers(self, task: UpdatableTask) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            for layer in range(2):
                hidden = x + 0
                out = torch.empty_like(hidden)
                task(hidden, out, task=f"layer.{layer}")
                x = out + 1
            return x

        return forward

    def captured(self, pool: GraphPool) -> tuple[Any, torch.Tensor]:
        """A wrapper that has captured the two layers, with lengths of 0, and its input."""
        self.need(Capability.TASK_UPDATE)
        wrapper = self.wrap(self.two_layers(self.task()), FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        out = self.capture(wrapper, FULL, x, descriptor=DESCRIPTOR)
        assert self.first(out) == [3, 4, 5, 6]
        return wrapper, x

    def run(self, wrapper: Any, x: torch.Tensor, updates: Any) -> list[float]:
        return self.first(self.step(wrapper, FULL, x, descriptor=DESCRIPTOR, updates=updates))

    def test_an_eager_task_is_just_issued(self, pool: GraphPool) -> None:
        forward = self.two_layers(self.task())
        x = self.tensor(1, 2, 3, 4)
        updates = {"attention": {"lengths": [1]}}
        out = self.step(forward, PIECEWISE, x, descriptor=DESCRIPTOR, updates=updates)
        assert self.first(out) == [7, 11, 15, 19]

    def test_a_groups_update_reaches_all_of_its_layers(self, pool: GraphPool) -> None:
        wrapper, x = self.captured(pool)
        assert self.run(wrapper, x, {"attention": {"lengths": [1]}}) == [7, 11, 15, 19]
        assert self.run(wrapper, x, {"attention": {"lengths": [0, 2]}}) == [13, 22, 31, 40]

    def test_a_layers_own_update_goes_before_its_groups(self, pool: GraphPool) -> None:
        wrapper, x = self.captured(pool)
        updates = {"attention": {"lengths": [0]}, "layer.1": {"lengths": [1]}}
        assert self.run(wrapper, x, updates) == [5, 7, 9, 11]

    def test_unchanged_repeats_the_values_of_the_replay_before(self, pool: GraphPool) -> None:
        wrapper, x = self.captured(pool)
        self.run(wrapper, x, {"attention": {"lengths": [1]}})
        x.copy_(self.tensor(2, 3, 4, 5))
        assert self.run(wrapper, x, UNCHANGED) == [11, 15, 19, 23]

    def test_equal_updates_need_no_new_ones(self, pool: GraphPool) -> None:
        wrapper, x = self.captured(pool)
        for _ in range(3):
            assert self.run(wrapper, x, {"attention": {"lengths": [1]}}) == [7, 11, 15, 19]

    @pytest.mark.parametrize(
        ("updates", "error", "text"),
        [
            (None, MissingUpdateError, "UNCHANGED"),
            ({}, MissingUpdateError, "layer.0"),
            ({"layer.0": {"lengths": [1]}}, MissingUpdateError, "layer.1"),
            ({"mlp": {}, "attention": {"lengths": [1]}}, InvalidUpdateError, "mlp"),
            ({"attention": {"lens": [1]}}, InvalidUpdateError, "lens"),
            ({"attention": {}}, InvalidUpdateError, "lengths"),
            ({"attention": {"lengths": [1] * 5}}, InvalidUpdateError, "5"),
            ({"attention": {"lengths": []}}, InvalidUpdateError, "0"),
        ],
    )
    def test_a_bad_update_is_refused_before_anything_runs(
        self, pool: GraphPool, updates: Any, error: type[GraphRTError], text: str
    ) -> None:
        wrapper, x = self.captured(pool)
        with pytest.raises(error, match=text):
            self.run(wrapper, x, updates)
        assert self.run(wrapper, x, {"attention": {"lengths": [1]}}) == [7, 11, 15, 19]

    def test_a_task_asks_for_its_workspace_at_capture_and_keeps_it(self, pool: GraphPool) -> None:
        self.need(Capability.TASK_UPDATE)
        base_task, asked, addresses = self.task(), [], set()

        def issue(
            x: torch.Tensor,
            out: torch.Tensor,
            *,
            lengths: list[int],
            workspace: torch.Tensor | None = None,
        ) -> None:
            scratch = torch.empty_like(x) if workspace is None else workspace
            addresses.add(scratch.data_ptr())
            base_task.issue(x, scratch, lengths=lengths)
            torch.mul(scratch, 1, out=out)

        def workspace(
            x: torch.Tensor, out: torch.Tensor, *, lengths: list[int]
        ) -> dict[str, torch.Tensor]:
            asked.append(lengths)
            return {"workspace": torch.empty_like(x)}

        task = UpdatableTask(
            "attention",
            issue,
            base_task.host_args,
            at_capture=base_task.at_capture,
            workspace=workspace,
        )
        wrapper = self.wrap(self.two_layers(task), FULL, pool)
        x, updates = self.tensor(1, 2, 3, 4), {"attention": {"lengths": [1]}}
        eager = self.step(
            self.two_layers(task), PIECEWISE, x, descriptor=DESCRIPTOR, updates=updates
        )
        assert asked == []
        addresses.clear()
        self.capture(wrapper, FULL, x, descriptor=DESCRIPTOR)
        assert asked == [[0] * 4] * 2
        fixed = set(addresses)
        assert self.run(wrapper, x, updates) == self.first(eager) == [7, 11, 15, 19]
        assert self.run(wrapper, x, {"attention": {"lengths": [0, 2]}}) == [13, 22, 31, 40]
        assert addresses == fixed and len(asked) == 2

    def test_tasks_on_both_sides_of_an_eager_break_are_updated(self, pool: GraphPool) -> None:
        self.need(Capability.TASK_UPDATE)
        layers = self.two_layers(self.task())
        wrapper = self.wrap(
            lambda x: layers(torch.sigmoid(layers(x) * 0) * 2),
            PIECEWISE,
            pool,
            breakable=True,
            breaks=frozenset({"aten::sigmoid"}),
        )
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, PIECEWISE, x, descriptor=DESCRIPTOR)
        updates = {"attention": {"lengths": [1]}}
        out = self.step(wrapper, PIECEWISE, x, descriptor=DESCRIPTOR, updates=updates)
        assert self.first(out) == [7, 7, 7, 7]

    def test_nothing_is_issued_where_nothing_changed(self, pool: GraphPool) -> None:
        self.need(Capability.TASK_UPDATE)
        task = self.task()
        wrapper = self.wrap(self.two_layers(task), FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, FULL, x, descriptor=DESCRIPTOR)
        issue = Counting(task.issue)
        task.issue = issue
        lengths = [1]
        updates = {"attention": {"lengths": lengths}}
        assert self.run(wrapper, x, updates) == [7, 11, 15, 19]
        assert issue.calls == 2
        assert self.run(wrapper, x, updates) == [7, 11, 15, 19]
        assert self.run(wrapper, x, {"attention": {"lengths": (1, 0)}}) == [7, 11, 15, 19]
        assert self.run(wrapper, x, UNCHANGED) == [7, 11, 15, 19]
        assert issue.calls == 2
        lengths[0] = 2
        assert self.run(wrapper, x, updates) == [13, 22, 31, 40]
        assert issue.calls == 4

    @pytest.mark.parametrize("layer", [0, 1])
    def test_an_update_that_raises_leaves_a_device_that_serves_the_next_step(
        self, pool: GraphPool, layer: int
    ) -> None:
        self.need(Capability.TASK_UPDATE)
        task = self.task()
        wrapper = self.wrap(self.two_layers(task), FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, FULL, x, descriptor=DESCRIPTOR)
        assert self.run(wrapper, x, {"attention": {"lengths": [2]}}) == [13, 22, 31, 40]
        task.issue = fail_in(task.issue, layer)
        with pytest.raises(Boom):
            self.run(wrapper, x, {"attention": {"lengths": [1]}})
        self.platform.synchronize()
        with pytest.raises(MissingUpdateError, match="half-way"):
            self.run(wrapper, x, UNCHANGED)
        # Equal to the arguments before the failure. The device may have lost them: give them again.
        assert self.run(wrapper, x, {"attention": {"lengths": [2]}}) == [13, 22, 31, 40]
        assert self.run(wrapper, x, UNCHANGED) == [13, 22, 31, 40]

    def test_graphs_of_one_pool_keep_their_own_arguments(self, pool: GraphPool) -> None:
        self.need(Capability.TASK_UPDATE)
        wrapper = self.wrap(self.two_layers(self.task()), FULL, pool)
        large, small = self.tensor(1, 2, 3, 4), self.tensor(1, 2)
        half = BatchDescriptor(2, 2)
        self.capture(wrapper, FULL, large, descriptor=DESCRIPTOR)
        self.capture(wrapper, FULL, small, descriptor=half)
        one, two = {"attention": {"lengths": [1]}}, {"attention": {"lengths": [2]}}
        for _ in range(3):
            assert self.run(wrapper, large, one) == [7, 11, 15, 19]
            out = self.step(wrapper, FULL, small, descriptor=half, updates=two)
            assert self.first(out) == [13, 22]
            assert self.run(wrapper, large, UNCHANGED) == [7, 11, 15, 19]
            out = self.step(wrapper, FULL, small, descriptor=half, updates=UNCHANGED)
            assert self.first(out) == [13, 22]

    def test_query_lengths_that_do_not_add_up_are_refused_before_anything_runs(
        self, pool: GraphPool
    ) -> None:
        self.need(Capability.TASK_UPDATE)
        task = self.task()
        task.host_args["lengths"] = HostArg("reqs", "cumulative")
        task.at_capture = lambda descriptor: {"lengths": [1, 2, 3, 4]}
        wrapper = self.wrap(self.two_layers(task), FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, FULL, x, descriptor=DESCRIPTOR)
        issue = Counting(task.issue)
        task.issue = issue
        for wrong in ([1, 2, 3, 3], [2, 1], [1, 5], [-1, 2]):
            with pytest.raises(InvalidUpdateError, match="add up"):
                self.run(wrapper, x, {"attention": {"lengths": wrong}})
        assert issue.calls == 0
        # [0, 0, 0, 4]: the padding request takes the padding tokens.
        assert self.run(wrapper, x, {"attention": {"lengths": [0]}}) == [31, 56, 81, 106]


class Boom(Exception):
    """The error of an update that fails on purpose."""


def fail_in(issue: Any, layer: int) -> Any:
    """`issue`, which raises once, in its call number `layer`."""
    calls = [-1]

    def issue_or_fail(*args: Any, **kwargs: Any) -> None:
        calls[0] += 1
        if calls[0] == layer:
            raise Boom(f"layer {layer}")
        issue(*args, **kwargs)

    return issue_or_fail
