"""The whole runner on a device: every mode, padding, state, release and close."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphrt._runner import GraphRunner
from graphrt.core.base.errors import CaptureError, OverwrittenOutputError, PoolClosedError
from graphrt.core.base.torch_names import can_mark_unreadable
from graphrt.core.batch.descriptor import Batch
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.guard import eager_break
from graphrt.core.capture.options import GraphOptions
from graphrt.core.dispatch.reasons import Reason
from graphrt.core.inputs.spec import InputSpec
from graphrt.core.runner.host import Host
from graphrt.testing.conformance.base import ConformanceBase

MODES = ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]


@eager_break
def attention(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y


class RunnerConformance(ConformanceBase):
    def runner(self, **options: Any) -> GraphRunner:
        """A runner of (x + 1) * y * 2 + the number of runs; the product with y is an eager part.
        Its forward raises while `self.fail` is true."""
        self.counter = self.tensor(0)
        self.fail = False

        def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.counter.add_(1)
            if self.fail:
                raise ValueError("boom")
            return attention(x + 1, y) * 2 + self.counter

        arguments: dict[str, Any] = {
            "inputs": {
                "x": InputSpec(torch.float32, ("tokens", 8)),
                "y": InputSpec(torch.float32, ("tokens", 8)),
            },
            "outputs": ("tokens", 8),
            "sizes": [2, 4],
            "platform": self.platform,
            "host": Host(state=[self.counter]),
            **options,
        }
        return GraphRunner(forward, **arguments)

    def reason_of_one_row(self, runner: GraphRunner) -> Reason:
        runner(Batch(1, 1, 1), **self.values(0))
        assert runner.last_dispatch is not None
        return runner.last_dispatch.reason

    def values(self, *rows: float) -> dict[str, torch.Tensor]:
        return {"x": self.tensor(*rows), "y": self.tensor(*[10.0] * len(rows))}

    @pytest.mark.parametrize("mode", MODES)
    def test_what_a_host_does_to_an_output_never_reaches_the_next_step(self, mode: str) -> None:
        with self.runner(mode=mode, host=None) as runner:
            runner.capture()
            for rows in ([1.0], [1.0, 2.0], [1.0] * 5):
                for edit in (torch.Tensor.unsqueeze_, torch.Tensor.zero_, torch.Tensor.t_):
                    self.counter.zero_()
                    out = runner(Batch(len(rows), len(rows), 1), **self.values(*rows))
                    assert self.host(out).tolist() == [[10 * (row + 1) * 2 + 1] * 8 for row in rows]
                    edit(*(out, 0) if edit is torch.Tensor.unsqueeze_ else (out,))

    @pytest.mark.parametrize("mode", MODES)
    def test_an_output_of_an_earlier_step_is_never_read_as_the_later_ones(self, mode: str) -> None:
        # Without checks, as a trial hands out a copy.
        unchecked = GraphOptions(check="off")
        with self.runner(mode=mode, host=None, options=unchecked) as runner:
            runner.capture()
            self.counter.zero_()
            first = runner(Batch(2, 2, 1), **self.values(1.0, 2.0))
            expected = self.host(first).clone()
            runner(Batch(2, 2, 1), **self.values(7.0, 8.0))
            marked = self.platform.raw_storages and can_mark_unreadable
            if mode == "NONE" or not marked:
                assert torch.equal(self.host(first), expected)
            else:
                with pytest.raises(RuntimeError, match=OverwrittenOutputError.__name__):
                    self.host(first)

    @pytest.mark.parametrize("mode", MODES)
    def test_every_mode_gives_what_the_padded_eager_run_gives(self, mode: str) -> None:
        with self.runner(mode=mode) as runner:
            runner.capture()
            for rows in ([1.0], [1.0, 2.0], [3.0, 4.0, 5.0], [1.0] * 5):
                batch = Batch(len(rows), len(rows), 1)
                self.counter.zero_()
                outputs = self.host(runner(batch, **self.values(*rows)))
                dispatch = runner.last_dispatch
                assert dispatch is not None
                if dispatch.mode is GraphMode.NONE:
                    assert dispatch.reason in (Reason.TOO_LARGE, Reason.MODE_NONE)
                    continue
                self.counter.zero_()
                expected = runner.run_padded_eagerly(batch, dispatch, self.values(*rows))
                assert outputs.shape == (len(rows), 8)
                assert torch.equal(outputs, self.host(expected))

    def test_capture_leaves_declared_state_as_it_was(self) -> None:
        with self.runner(mode="FULL_AND_PIECEWISE") as runner:
            self.counter.fill_(7)
            runner.capture()
            assert self.first(self.counter) == [7]
            out = runner(Batch(1, 1, 1), **self.values(0))
            assert self.first(self.counter) == [8]
            assert self.first(out) == [28]

    def test_before_capture_everything_is_eager_and_says_so(self) -> None:
        with self.runner(mode="FULL") as runner:
            out = runner(Batch(1, 1, 1), **self.values(0))
            assert self.first(out) == [21]
            assert runner.last_dispatch is not None
            assert runner.last_dispatch.reason is Reason.NOT_CAPTURED

    def test_a_failed_capture_publishes_nothing_and_a_further_one_passes(self) -> None:
        with self.runner(mode="FULL_AND_PIECEWISE", options=None) as runner:
            self.fail = True
            with pytest.raises((CaptureError, ValueError)):
                runner.capture()
            assert runner.dispatcher.published == ()
            assert self.first(self.counter) == [0]
            self.fail = False
            runner.capture()
            assert len(runner.dispatcher.published) == len(runner.plan.keys)

    def test_released_graphs_are_captured_again_and_closed_ones_are_not(self) -> None:
        runner = self.runner(mode="FULL")
        runner.capture()
        runner.release()
        assert self.reason_of_one_row(runner) is Reason.NOT_CAPTURED
        runner.recapture()
        assert self.reason_of_one_row(runner) is Reason.HIT
        runner.close()
        with pytest.raises(PoolClosedError):
            runner(Batch(1, 1, 1), **self.values(0))
        with pytest.raises(PoolClosedError):
            runner.capture()
