"""A runner that a user can get has the checks of its level: only `GraphRunner` makes a `Runner`."""

from __future__ import annotations

import ast
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

import graphrt
import graphrt.observe
from graphrt import GraphOptions, GraphRunner, Host, InputSpec
from graphrt.cli import doctor
from graphrt.core.device.registry import get_platform
from graphrt.core.runner.contract import StepChecks
from graphrt.core.runner.runner import Runner
from graphrt.demo.app import run_demo
from graphrt.ranks import Agreement
from graphrt.testing import PlatformConformance
from graphrt.trust.runner_checks import RunnerChecks

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
    assert {*makers} == {"_runner.py"}


# Every public way to a runner -----------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


X = {"x": InputSpec(torch.float32, ("tokens", 4))}


def by_compile() -> None:
    compiled = graphrt.compile(Model().eval(), {"x": 0})
    GraphRunner(compiled, mode="PIECEWISE", sizes=[2], inputs=X, platform="cpu").capture()


def by_observe() -> None:
    assert graphrt.observe.explain(lambda x: x + 1, X, tokens=2, platform="cpu").obstacles == ()


def by_doctor() -> None:
    assert doctor._tried("cpu")["error"] is None


def by_conformance() -> None:
    class Suite(PlatformConformance):
        platform = get_platform("cpu")

    Suite().runner_of(lambda x: x + 1).capture()


def by_demo() -> None:
    assert run_demo(console=Console(file=io.StringIO()), max_new_tokens=2, sizes=[4, 16]) == 0


def by_ranks() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with Agreement(timeout_s=20) as agreement:
            host = Host(ranks=agreement)
            GraphRunner(lambda x: x + 1, mode="FULL", sizes=[2], inputs=X, host=host).capture()
    finally:
        dist.destroy_process_group()


def by_transformers() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from graphrt.hosts.transformers import with_graphs
    from tests.models.generating import new_model

    model = with_graphs(new_model("llama"), max_batch=2, max_len=16)
    model.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=3, do_sample=False)


WAYS = (by_compile, by_observe, by_doctor, by_conformance, by_demo, by_ranks, by_transformers)


@pytest.mark.parametrize("variable", ["", "off"])
@pytest.mark.parametrize("way", WAYS)
def test_a_runner_made_in_any_public_way_has_its_checks_on(
    way: Callable[[], None], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Runner[Any]] = []
    make = Runner.__init__

    def noting(self: Runner[Any], *args: Any) -> None:
        make(self, *args)
        made.append(self)

    monkeypatch.setattr(Runner, "__init__", noting)
    monkeypatch.setenv("GRAPHRT_CHECK", variable)
    way()
    assert made
    for runner in made:
        checks, is_on = runner.graphs.checks, not variable
        assert (checks.on, isinstance(checks, RunnerChecks)) == (is_on, is_on)
        assert (runner.options.check == "off") == (not is_on)
