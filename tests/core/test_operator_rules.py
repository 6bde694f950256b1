"""Rows of `OPERATORS`: a rule fires in every capture of its devices and modes, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphrt import (
    BatchDescriptor,
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphRunner,
    GraphWrapper,
    InputSpec,
    eager_break,
    forward_context,
)
from graphrt.core.base.errors import RefusedOpError
from graphrt.core.capture import refusals
from graphrt.core.capture.guard import CaptureGuard, check_break
from graphrt.core.capture.refusals import OperatorRule, Refusal

CUMSUM = Refusal(RefusedOpError, "no sums that run", advice="leave them out")
RULE = OperatorRule(frozenset({"aten::cumsum"}), CUMSUM)
LEVELS = ["off", "capture", "first", "sample", "always"]


def always(x: Tensor) -> Tensor:
    return x.cumsum(1)


def only_small(x: Tensor) -> Tensor:
    return x.cumsum(1) if x.shape[0] <= 2 else x * 1


@eager_break
def summed(x: Tensor) -> Tensor:
    return x.cumsum(1)


def by_runner(
    forward: Callable[[Tensor], Tensor], mode: str, check: Any = "capture", **kind: Any
) -> Any:
    inputs = {"x": InputSpec(torch.float32, ("tokens", 4))}
    options = GraphOptions(check=check, **kind)
    runner = GraphRunner(
        forward,
        mode=mode,
        sizes=[2, 4],
        inputs=inputs,
        outputs=("tokens", 4),
        options=options,
        platform="cpu",
    )
    runner.capture()
    return runner


def by_wrapper(forward: Callable[[Tensor], Tensor], mode: str) -> Any:
    options = GraphOptions(lazy=True)
    wrapper = GraphWrapper(forward, mode, pool=GraphPool("cpu"), options=options)
    with forward_context(mode, BatchDescriptor(4)):
        return wrapper(torch.ones(4, 4))


def add(monkeypatch: pytest.MonkeyPatch, *rules: OperatorRule) -> None:
    monkeypatch.setattr(refusals, "OPERATORS", (*refusals.OPERATORS, *rules))


@pytest.mark.parametrize("check", LEVELS)
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("forward", [always, only_small])
def test_a_rule_fires_at_every_size_mode_and_level(
    forward: Any, mode: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(monkeypatch, RULE)
    with pytest.raises(RefusedOpError, match="no sums that run") as caught:
        by_runner(forward, mode, check)
    assert "aten.cumsum" in str(caught.value) and "x.cumsum(1)" in str(caught.value)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_rule_fires_in_a_bare_wrapper(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, RULE)
    with pytest.raises(RefusedOpError, match="no sums that run"):
        by_wrapper(always, mode)


def test_a_rule_for_other_devices_modes_overloads_or_calls_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add(
        monkeypatch,
        RULE._replace(devices=frozenset({"cuda"})),
        RULE._replace(modes=frozenset({GraphMode.PIECEWISE})),
        RULE._replace(operators=frozenset({"aten::cumsum.out", "no_such::operator"})),
        RULE._replace(is_broken=lambda args, kwargs: args[1] == 0),
    )
    by_wrapper(always, "FULL")
    by_runner(always, "FULL", "always").close()


def test_a_rule_leaves_eager_parts_and_breaks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, RULE)
    by_runner(lambda x: summed(x * 2) + 1, "PIECEWISE").close()
    by_runner(lambda x: x.mul(2).cumsum(1) + 1, "PIECEWISE", breaks=("aten::cumsum",)).close()


@pytest.mark.parametrize("rule", [None, RULE._replace(devices=frozenset({"cuda"}))])
def test_captures_that_no_rule_is_for_do_not_enter_the_guard(
    rule: OperatorRule | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[CaptureGuard] = []
    enter = CaptureGuard.__enter__
    monkeypatch.setattr(
        CaptureGuard, "__enter__", lambda self: (entered.append(self), enter(self))[1]
    )
    if rule is not None:
        add(monkeypatch, rule)
    by_wrapper(always, "FULL")
    by_runner(always, "FULL", "off").close()
    assert not entered
    add(monkeypatch, RULE._replace(is_broken=lambda args, kwargs: False))
    by_wrapper(always, "FULL")
    assert entered


def test_operators_of_all_rules_can_be_seen() -> None:
    for rule in refusals.OPERATORS:
        for name in rule.operators:
            check_break(name)
