"""New weights on a GPU: which graphs stay, that they read the new values, and old memory."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from graphrt import Batch, GraphRunner, InputSpec, Reason, current_context

pytestmark = pytest.mark.cuda

WIDTH = 1024
BYTES = WIDTH * WIDTH * 4


class Adapted(nn.Module):
    """A layer, and a large adapter that only some graphs read."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        descriptor = current_context().descriptor
        y = self.base(x)
        if descriptor is not None and descriptor.num_active_loras:
            y = y + self.adapter(x)
        return y


def other() -> nn.Parameter:
    return nn.Parameter(torch.randn(WIDTH, WIDTH, device="cuda"))


@torch.no_grad()
def update_in_place(model: Adapted) -> None:
    for weight in model.parameters():
        weight.normal_()


def replace_adapter(model: Adapted) -> None:
    model.adapter.weight = other()


def replace_adapter_data(model: Adapted) -> None:
    model.adapter.weight.data = other().data


def replace_base(model: Adapted) -> None:
    model.base.weight = other()


@pytest.mark.parametrize(
    ("change", "count"),
    [(update_in_place, 0), (replace_adapter, 3), (replace_adapter_data, 3), (replace_base, 6)],
)
def test_only_graphs_that_new_weights_outdate_are_captured_again_on_a_gpu(
    change: Callable[[Adapted], None], count: int
) -> None:
    torch.manual_seed(0)
    model = Adapted().cuda().requires_grad_(requires_grad=False)
    runner = GraphRunner(
        model,
        mode="FULL",
        sizes=[1, 2, 4],
        loras=(0, 4),
        inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
        outputs=("tokens", WIDTH),
        platform="cuda",
    )

    def are_right() -> None:
        for tokens in (4, 2, 1):
            for loras in (0, tokens):
                x = torch.randn(tokens, WIDTH, device="cuda")
                got = runner(Batch(tokens, num_active_loras=loras), x=x)
                expected = model.base(x) + (model.adapter(x) if loras else 0)
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)
                assert runner.last_dispatch is not None
                assert runner.last_dispatch.reason is Reason.HIT

    with runner, torch.no_grad():
        runner.capture()
        are_right()
        levels = []
        for _ in range(3):
            before = runner.pool.captures
            change(model)
            runner.recapture(only_outdated=True)
            assert runner.pool.captures - before == count
            are_right()
            assert all(each.failure is None for each in runner.report().trust.trials)
            gc.collect()
            levels.append(torch.cuda.memory_allocated())
        # Old weights are freed: else each load would keep one.
        assert levels[-1] - levels[0] < BYTES
