"""Out of memory in the middle of `capture()`: graphs that fit serve, dropped sizes are retried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphrt import Batch, GraphMode, GraphOptions, GraphRunner, InputSpec, Reason, errors

pytestmark = pytest.mark.cuda

MIB = 1 << 20
SIZES = [1, 2, 4, 8, 16]


def lift() -> None:
    torch.cuda.set_per_process_memory_fraction(1.0)


def hungry_runner(mode: str, mib_of: Callable[[int], int], **options: Any) -> GraphRunner:
    """Its forward needs so many MiB of workspace at a size; 16 times as much under capture.

    More under capture, so that a size whose graph does not fit can still be run eagerly.
    """

    def forward(x: torch.Tensor) -> torch.Tensor:
        mib = mib_of(x.shape[0]) * (16 if torch.cuda.is_current_stream_capturing() else 1)
        workspace = torch.empty(mib * MIB // 4, device=x.device)
        workspace[: x.numel()] = x.flatten()
        return workspace[: x.numel()].view(x.shape) + 1

    return GraphRunner(
        forward,
        mode=mode,
        sizes=SIZES,
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 8),
        platform="cuda",
        **options,
    )


def served(runner: GraphRunner, rows: int) -> tuple[GraphMode, Reason]:
    x = torch.arange(rows * 8.0).view(rows, 8)
    assert torch.equal(runner(Batch(rows, rows, 1), x=x).cpu(), x + 1)
    return runner.last_dispatch.mode, runner.last_dispatch.reason


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_capture_sizes_that_do_not_fit_are_dropped_and_captured_later(limit, mode):
    runtime_mode = GraphMode[mode]
    # Captured, 16 rows need 2 GiB, 8 need 1 GiB, and those after them share its memory.
    with hungry_runner(mode, lambda tokens: 8 * tokens) as runner:
        limit(1536 * MIB)
        with pytest.warns(errors.GraphsDroppedWarning):
            runner.capture()
        (dropped,) = runner.report().dropped
        assert dropped.mode is runtime_mode
        assert dropped.descriptor.num_tokens == 16
        assert "memory" in str(dropped.reason).lower()
        for rows in (1, 2, 3, 5, 8):
            assert served(runner, rows) == (runtime_mode, Reason.HIT)
        for rows in (9, 16):
            mode_of_step, reason = served(runner, rows)
            assert mode_of_step is GraphMode.NONE and reason is not Reason.HIT
        lift()
        runner.capture()
        assert runner.report().dropped == ()
        assert len(runner.report().graphs) == len(SIZES)
        for rows in (1, 8, 9, 16):
            assert served(runner, rows) == (runtime_mode, Reason.HIT)


def test_batches_of_a_dropped_middle_size_are_served_by_a_larger_graph(limit):
    appetite = {4: 256}
    with hungry_runner("FULL", lambda tokens: appetite.get(tokens, 2)) as runner:
        limit(1024 * MIB)
        with pytest.warns(errors.GraphsDroppedWarning):
            runner.capture()
        assert [record.descriptor.num_tokens for record in runner.report().dropped] == [4]
        for rows in (1, 2, 3, 4, 16):
            assert served(runner, rows) == (GraphMode.FULL, Reason.HIT)
        runner(Batch(4, 4, 1), x=torch.zeros(4, 8))
        assert runner.last_dispatch.descriptor.num_tokens == 8


def test_strict_capture_raises_out_of_memory_and_keeps_earlier_graphs(limit):
    appetite = {4: 256}
    options = GraphOptions(strict=True)
    with hungry_runner("FULL", lambda t: appetite.get(t, 2), options=options) as runner:
        limit(1024 * MIB)
        with pytest.raises(errors.ResourceExhaustedError, match="memory"):
            runner.capture()
        captured = {record.descriptor.num_tokens for record in runner.report().graphs}
        assert captured >= {16, 8} and 4 not in captured
        assert served(runner, 8) == (GraphMode.FULL, Reason.HIT)
        lift()
        runner.capture()
        assert len(runner.report().graphs) == len(SIZES)


def test_eager_work_and_other_runners_go_on_after_a_drop(limit):
    with hungry_runner("FULL", lambda tokens: 8 * tokens) as runner:
        limit(1536 * MIB)
        with pytest.warns(errors.GraphsDroppedWarning):
            runner.capture()
        ones = torch.ones(256, 256, device="cuda")
        assert (ones @ ones == 256).all()
        with hungry_runner("FULL", lambda tokens: 1) as other:
            other.capture()
            assert served(other, 16) == (GraphMode.FULL, Reason.HIT)
        assert served(runner, 8) == (GraphMode.FULL, Reason.HIT)
