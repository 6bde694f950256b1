"""A runner that a user can get has the checks of its level: only `GraphRunner` makes a `Runner`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import graphrt
from graphrt import GraphOptions, GraphRunner, InputSpec
from graphrt.core.runner.contract import StepChecks
from graphrt.core.runner.runner import Runner
from graphrt.trust.runner import RunnerChecks

PACKAGE = Path(graphrt.__file__).parent
LEVELS = ("off", "capture", "first", "sample", "always")


def runner_of(check: str) -> GraphRunner[torch.Tensor]:
    spec = InputSpec(torch.float32, ("tokens", 4))
    options = GraphOptions(check=check)
    return GraphRunner(
        lambda x: x + 1, mode="FULL", sizes=[2], inputs={"x": spec}, options=options, platform="cpu"
    )


@pytest.mark.parametrize("variable", ["", *LEVELS])
@pytest.mark.parametrize("check", LEVELS)
def test_the_level_in_force_decides_which_checks_a_runner_has(
    check: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHRT_CHECK", variable)
    runner = runner_of(check)
    checks, is_on = runner.graphs.checks, (variable or check) != "off"
    assert runner.options.check == (variable or check)
    assert (checks.on, isinstance(checks, RunnerChecks)) == (is_on, is_on)
    assert isinstance(checks, StepChecks)
    assert isinstance(runner, Runner)


def test_no_other_module_makes_a_runner_of_core() -> None:
    """hosts, compile, demo, observe, ranks, testing and cli make a `GraphRunner`, so theirs have
    checks too."""
    makers = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = (
                getattr(node.func, "id", getattr(node.func, "attr", ""))
                if isinstance(node, ast.Call)
                else ""
            )
            bases = [getattr(each, "id", "") for each in getattr(node, "bases", ())]
            subscripted = [
                getattr(each.value, "id", "")
                for each in getattr(node, "bases", ())
                if isinstance(each, ast.Subscript)
            ]
            if name == "Runner" or "Runner" in bases + subscripted:
                makers.append(str(file.relative_to(PACKAGE)))
    assert makers == ["_runner.py"]
