"""Inputs that only some steps have: `InputSpec(optional=True)`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from graphrt import (
    Batch,
    Example,
    GraphOptions,
    GraphRunner,
    Host,
    InputSpec,
    Reason,
    current_context,
    graphed,
)
from graphrt.errors import InvalidBatchError, InvalidInputError

X = InputSpec(torch.float32, ("tokens", 2))
MASK = InputSpec(torch.float32, ("tokens", 1), pad=1.0, optional=True)


def forward(x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    return x if mask is None else x * mask


def runner_of(call: Any = forward, **more: Any) -> GraphRunner[torch.Tensor]:
    more = {"mode": "FULL", "sizes": [4, 8], "platform": "cpu", **more}
    return GraphRunner(call, **{"inputs": {"x": X, "mask": MASK}, **more})


@pytest.mark.parametrize("check", ["off", "capture", "first", "always"])
def test_steps_with_and_without_an_optional_input_are_both_served(check: Any) -> None:
    """Of Megatron-LM#1055 and TransformerEngine#945; before, a runner each."""
    runner = runner_of(options=GraphOptions(check=check))
    runner.capture()
    for rows in (3, 4, 7, 3):
        x = torch.rand(rows, 2)
        for mask in ({"mask": torch.zeros(rows, 1)}, {}, {"mask": None}):
            for batch in (None, Batch(rows)):
                out = runner(batch, x=x, **mask)
                assert torch.equal(out, x * 0 if mask.get("mask") is not None else x)
                assert runner.last_dispatch is not None
                assert runner.last_dispatch.reason is Reason.HIT
    assert len(runner.report().graphs) == 2


def test_steps_without_a_graph_too_may_lack_an_optional_input() -> None:
    runner = runner_of()
    assert torch.equal(runner(x=torch.ones(3, 2)), torch.ones(3, 2))
    runner.capture()
    assert torch.equal(runner(x=torch.ones(9, 2)), torch.ones(9, 2))
    assert torch.equal(runner(torch.ones(3, 2)), torch.ones(3, 2))
    assert torch.equal(runner.verify(x=torch.ones(3, 2)), torch.ones(3, 2))
    batch = Batch(3, 3, 1)
    found = runner.dispatcher.dispatch(batch)
    assert torch.equal(runner.run_padded_eagerly(batch, found, {"x": X_ONES}), X_ONES)


X_ONES = torch.ones(3, 2)


def test_an_input_slot_holds_the_value_of_an_optional_input_until_it_is_written() -> None:
    runner = runner_of()
    runner.capture()
    slot = runner.slot(Batch(3))
    slot["x"].fill_(2.0)
    assert torch.equal(runner(slot), torch.full((3, 2), 2.0))
    slot["mask"].zero_()
    assert torch.equal(runner(slot), torch.zeros(3, 2))


def test_a_capture_tries_examples_that_lack_an_optional_input() -> None:
    host = Host(example=lambda batch, _: Example({"x": torch.ones(batch.num_tokens, 2)}))
    runner = runner_of(host=host)
    runner.capture()
    runner.measure()
    assert {each.status for each in runner.report().trust.trials} == {"tried"}


def test_an_optional_input_may_be_nested_and_of_requests() -> None:
    def call(x: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
        return x + more["bias"].sum() + more["shift"]

    bias = InputSpec(torch.float32, ("reqs", 2), pad=0, optional=True)
    shift = InputSpec(torch.float32, (), pad=0, optional=True)
    runner = runner_of(call, inputs={"x": X, "more": {"bias": bias, "shift": shift}})
    runner.capture()
    x = torch.ones(4, 2)
    assert torch.equal(runner(Batch(4, 2), x=x), x)
    assert torch.equal(runner(x=x, more={"bias": torch.ones(2, 2)}), x + 4)
    assert torch.equal(runner(Batch(4, 2), x=x, more={"shift": torch.tensor(1.0)}), x + 1)


def test_a_variant_has_a_graph_with_and_one_without_an_optional_input() -> None:
    ran = []

    def call(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ran.append(current_context().descriptor.variant)
        return x if ran[-1] == "plain" else x * mask

    runner = runner_of(call, variants=["plain", "masked"], sizes=[4])
    runner.capture()
    ran.clear()
    x = torch.ones(4, 2)
    assert torch.equal(runner(Batch(4, variant="plain"), x=x), x)
    masked = runner(Batch(4, variant="masked"), x=x, mask=torch.zeros(4, 1))
    assert torch.equal(masked, x * 0)
    assert len(runner.report().graphs) == 2


def test_graphed_takes_the_spec_of_an_optional_input() -> None:
    model = torch.nn.Module()
    model.forward = forward  # type: ignore[method-assign]
    x, mask = torch.rand(4, 2), torch.rand(4, 1)
    fast = graphed(model.eval(), (x, mask), [4], axes={"mask": MASK})
    assert torch.equal(fast(x[:3]), x[:3])
    assert torch.equal(fast(x, mask), x * mask)


@pytest.mark.parametrize("pad", [None, "repeat"])
def test_an_optional_input_without_a_value_is_refused(pad: Any) -> None:
    with pytest.raises(InvalidInputError, match="that steps without the input have") as caught:
        replace(MASK, pad=pad)
    assert "pad=1.0" in str(caught.value.advice)


def test_steps_that_lack_other_inputs_are_refused_by_name() -> None:
    with pytest.raises(InvalidInputError, match="optional"):
        replace(MASK, optional=1)
    runner = runner_of()
    runner.capture()
    with pytest.raises(InvalidInputError, match=r"missing \['x'\]"):
        runner(mask=torch.ones(3, 1))
    with pytest.raises(InvalidInputError, match=r"unknown \['y'\]"):
        runner(x=torch.ones(3, 2), y=torch.ones(3, 1))
    with pytest.raises(InvalidInputError, match="no tensor"):
        runner(x=None)
    all_optional = runner_of(inputs={"x": replace(X, pad=0, optional=True), "mask": MASK})
    with pytest.raises(InvalidBatchError, match="how large the batch is"):
        all_optional()
    assert torch.equal(all_optional(Batch(3)), torch.zeros(3, 2))


@pytest.mark.cuda
def test_an_optional_input_is_left_out_on_a_gpu() -> None:
    runner = runner_of(platform="cuda")
    runner.capture()
    x = torch.rand(3, 2, device="cuda")
    for _ in range(3):
        assert torch.equal(runner(x=x), x)
        assert torch.equal(runner(x=x, mask=torch.zeros(3, 1, device="cuda")), x * 0)
        assert torch.equal(runner(x=x.cpu()), x)
