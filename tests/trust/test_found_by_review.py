"""Programs that a reviewer wrote who knew the public docs only."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from graphrt import GraphRunner, InputSpec, Reason
from graphrt.errors import GraphQuarantinedWarning, InvalidInputError


def runner_of(forward: Callable[[Tensor], Tensor]) -> GraphRunner:
    return GraphRunner(
        forward,
        mode="FULL",
        sizes=[4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
        platform="cpu",
    )


ADVANCING = {
    "Decimal": (Decimal("0.5"), Decimal(1), float),
    "Fraction": (Fraction(1, 2), Fraction(1), float),
    "timedelta": (timedelta(seconds=1), timedelta(seconds=1), timedelta.total_seconds),
}


class Model(torch.nn.Module):
    """Scales by a number that advances with each step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.scale, self.step, self.number = ADVANCING[kind]

    def forward(self, x: Tensor) -> Tensor:
        self.scale += self.step
        return x * self.number(self.scale)


@pytest.mark.filterwarnings("ignore::graphrt.errors.GraphQuarantinedWarning")
@pytest.mark.parametrize("kind", ADVANCING)
def test_an_advancing_standard_library_object_is_never_baked_into_a_graph(kind: str) -> None:
    model, eager = Model(kind), Model(kind)
    runner = runner_of(model)
    runner.capture()
    for tokens in (4, 3, 4, 2):
        x = torch.rand(tokens, 4)
        assert torch.equal(runner(x=x), eager(x))
    assert model.scale == eager.scale


def test_a_context_variable_has_its_default_after_capture() -> None:
    steps = contextvars.ContextVar("steps", default=3)

    def forward(x: Tensor) -> Tensor:
        steps.set(steps.get() + 1)
        return x + 1

    runner = runner_of(forward)
    runner.capture()
    assert steps.get() == 3
    runner(x=torch.ones(9, 4))
    assert steps.get() == 4


def test_an_input_wrapped_by_vmap_is_refused_at_a_padded_step() -> None:
    runner = runner_of(lambda x: x * 2)
    runner.capture()
    with pytest.raises(InvalidInputError, match="no rows in memory"):
        torch.vmap(lambda x: runner(x=x))(torch.ones(2, 3, 4))
    assert runner(x=torch.ones(3, 4)).tolist() == [[2.0] * 4] * 3


def test_padding_that_overwrites_a_live_cache_row_is_found_with_an_empty_cache() -> None:
    cache, twin = torch.zeros(9, 16, 8), torch.zeros(9, 16, 8)

    def forward(x: Tensor, row: Tensor, position: Tensor) -> Tensor:
        cache[row, position] = x
        return cache[row].sum(1)

    runner = GraphRunner(
        forward,
        mode="FULL",
        sizes=[1, 2, 4],
        inputs={
            "x": InputSpec(torch.float32, ("tokens", 8)),
            # Not index=True: padding writes row 0 at position 0.
            "row": InputSpec(torch.int64, ("tokens",)),
            "position": InputSpec(torch.int64, ("tokens",)),
        },
        platform="cpu",
    )
    runner.capture()

    def step(rows: list[int], at: int) -> None:
        row, position, x = torch.tensor(rows), torch.full((3,), at), torch.randn(3, 8)
        twin[row, position] = x
        result = runner(x=x, row=row, position=position)
        torch.testing.assert_close(result, twin[row].sum(1))

    step([1, 2, 3], 0)
    named = r"padding \(position=0, row=0\) writes row 0, 0"
    with pytest.warns(GraphQuarantinedWarning, match=named):
        step([0, 4, 5], 0)
    for at in (1, 2):
        step([1, 2, 3], at)
        step([0, 4, 5], at)


@pytest.mark.filterwarnings("ignore::graphrt.errors.GraphQuarantinedWarning")
def test_a_raising_quarantined_step_is_reported_as_quarantined_without_a_graph() -> None:
    weight = [torch.ones(4, 4)]
    runner = runner_of(lambda x: x @ weight[0])
    runner.capture()
    x = torch.ones(4, 4)
    assert runner(x=x).tolist() == [[4.0] * 4] * 4
    weight[0] = torch.ones(4, 4)
    while runner.last_dispatch is None or runner.last_dispatch.reason is Reason.HIT:
        runner(x=x)
    weight[0] = torch.ones(4, 4, dtype=torch.float64)
    served = runner.last_dispatch
    with pytest.raises(RuntimeError, match="dtype"):
        runner(x=x)
    assert runner.last_dispatch is not served
    assert (runner.last_dispatch.reason, runner.last_dispatch.slot) == (Reason.QUARANTINED, -1)
