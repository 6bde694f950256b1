"""Which lengths UNCHANGED repeats after a refused step, a failed step or a capture example."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch

from graphrt import (
    UNCHANGED,
    Batch,
    Example,
    GraphOptions,
    GraphRunner,
    Host,
    HostArg,
    InputSpec,
    UpdatableTask,
)
from graphrt.core.base.errors import InvalidUpdateError, MissingUpdateError


class Scaled:
    """Rows times the sum of all lengths, which are arguments on the host."""

    def __init__(self, check: str = "off", example: Any = None) -> None:
        self.fails: type[BaseException] | None = None
        self.task = UpdatableTask(
            "scale",
            lambda x, out, lens: torch.add(x, x, alpha=sum(lens) - 1, out=out),
            {"lens": HostArg("reqs", "zero", least=0, most=100)},
            at_capture=lambda descriptor: {"lens": [100] * (descriptor.num_reqs or 1)},
        )
        self.runner = GraphRunner(
            self.forward,
            mode="FULL",
            sizes=[4],
            max_num_reqs=4,
            inputs={"x": InputSpec(torch.float32, ("tokens",))},
            outputs=("tokens",),
            platform="cpu",
            options=GraphOptions(check=check),
            host=Host(example=example, bind=self.bind),
        )
        self.runner.capture()

    def bind(self, *step: Any) -> None:
        if self.fails is not None:
            raise self.fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        self.task(x, out)
        return out

    def step(self, reqs: int, updates: Any) -> float:
        """What the first row comes to."""
        batch = Batch(reqs, reqs, 1)
        return float(self.runner(batch, updates=updates, x=torch.ones(reqs))[0])


def lens(*values: int) -> dict[str, Any]:
    return {"scale": {"lens": list(values)}}


LEVELS = pytest.mark.parametrize("check", ["off", "capture", "always"])


@LEVELS
def test_unchanged_after_a_refused_step_raises(check):
    model = Scaled(check)
    assert model.step(2, lens(5, 6)) == 11
    assert model.step(2, UNCHANGED) == 11
    with pytest.raises(InvalidUpdateError, match="typo"):
        model.step(3, {**lens(7, 8, 9), "typo": {}})
    with pytest.raises(MissingUpdateError, match="failed half-way"):
        model.step(3, UNCHANGED)
    assert model.step(3, lens(7, 8, 9)) == 24


@LEVELS
def test_unchanged_after_a_failed_step_raises(check):
    model = Scaled(check)
    assert model.step(2, lens(5, 6)) == 11
    model.fails = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        model.step(2, lens(7, 8))
    model.fails = None
    with pytest.raises(MissingUpdateError, match="failed half-way"):
        model.step(2, UNCHANGED)
    assert model.step(2, lens(7, 8)) == 15


@LEVELS
def test_a_failed_unchanged_step_may_be_retried(check):
    model = Scaled(check)
    assert model.step(2, lens(5, 6)) == 11
    model.runner.release()
    assert model.step(2, lens(1, 2)) == 3
    model.runner.capture()
    model.fails = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        model.step(2, UNCHANGED)
    model.fails = None
    assert model.step(2, UNCHANGED) == 3


def test_unchanged_never_repeats_the_lengths_of_a_capture_example():
    def example(batch: Batch, generator: torch.Generator) -> Example:
        return Example({"x": torch.ones(batch.num_tokens)}, lens(*[50] * batch.num_tokens))

    model = Scaled("capture", example)
    with pytest.raises(MissingUpdateError):
        model.step(2, UNCHANGED)
    assert model.step(2, lens(5, 6)) == 11
    model.runner.recapture()
    assert model.step(2, UNCHANGED) == 11


@LEVELS
@pytest.mark.parametrize(
    "wrong",
    [
        [True, False],
        torch.tensor([True, False]),
        {5, 6},
        {5: 6, 6: 7},
        {5: 6, 6: 7}.keys(),
        iter([5, 6]),
        (length for length in (5, 6)),
    ],
    ids=lambda wrong: type(wrong).__name__,
)
def test_lengths_that_are_no_list_of_integers_are_refused(check, wrong):
    model = Scaled(check)
    with pytest.raises(InvalidUpdateError, match="no list of whole numbers"):
        model.step(2, {"scale": {"lens": wrong}})
    for lengths in (range(5, 7), (5, 6), torch.tensor([5, 6]), array("i", [5, 6])):
        assert model.step(2, {"scale": {"lens": lengths}}) == 11
