"""Reports and warnings name tensors, shapes and counts, and quote no value of an input."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphrt import Batch, GraphOptions, GraphRTError, GraphRunner, Host, InputSpec

PROMPT = "please keep this to yourself"
CANARY = 7.140625
"""A value of the inputs, which no count is."""


class KeepsPrompts(nn.Module):
    """A forward that holds what it was given in Python, where it moves at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), CANARY))
        self.last = PROMPT
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.last = f"{PROMPT} {self.calls}"
        return x * self.scale


class GivesPrompts(KeepsPrompts):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.last


class MixesRows(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + x.sum(), PROMPT


class ReadsPrompt(KeepsPrompts):
    def forward(self, x: Tensor) -> Any:
        super().forward(x)
        return x * len(self.last)


class Random(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + next(self.numbers)

    numbers = iter(range(10**6))


class Clean(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x * 2


MODELS = (KeepsPrompts, GivesPrompts, MixesRows, ReadsPrompt, Random, Clean)


def said_of(model: nn.Module, level: str) -> str:
    """All that is reported, warned of or raised in a few steps."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        runner = GraphRunner(
            model,
            mode="FULL",
            sizes=[2, 4],
            inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
            options=GraphOptions(check=level),
            host=Host(),
            platform="cpu",
        )
        try:
            runner.capture()
        except GraphRTError as error:
            said.append(str(error))
        for rows in (3, 1, 4, 2):
            try:
                runner(Batch(rows, rows, 1), x=torch.full((rows, 4), CANARY))
            except GraphRTError as error:
                said.append(str(error))
        said.append(repr(runner.report()))
        said.append(str(runner.last_dispatch))
        runner.close()
    said += [str(each.message) for each in caught]
    return "\n".join(said)


@pytest.mark.parametrize("level", ["capture", "always"])
@pytest.mark.parametrize(
    "model", [KeepsPrompts, GivesPrompts, MixesRows, ReadsPrompt, Random, Clean]
)
def test_reports_findings_and_warnings_hold_no_prompt_and_no_value_of_an_input(model, level):
    said = said_of(model(), level)
    assert PROMPT not in said
    assert re.search(r"\b7\.14", said) is None
    assert not re.search(r"tensor\(", said)


def test_a_differing_string_is_described_by_its_place_and_not_its_text():
    assert "others with 4 tokens of 4 requests, at [1]" in said_of(GivesPrompts(), "capture")


class KeepsLongPrompts(KeepsPrompts):
    def forward(self, x: Tensor) -> Any:
        y = x * len(self.last)
        if len(x) > 4:
            self.last = f"{PROMPT}; " * 4
        return y


def test_a_long_text_left_by_an_eager_step_is_not_quoted_by_the_warning() -> None:
    inputs = {"x": InputSpec(torch.float32, ("tokens", 4))}
    forward = KeepsLongPrompts()
    forward.last = "nothing yet"
    with GraphRunner(forward, sizes=[2, 4], mode="FULL", inputs=inputs) as runner:
        runner.capture()
        for rows in (2, 6):
            runner(x=torch.ones(rows, 4))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runner(x=torch.ones(2, 4))
    (text,) = [str(each.message) for each in caught]
    assert "what eager steps have changed" in text and PROMPT not in text
