"""A child of a process that had pools says that it cannot use them, nor new ones."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from tests import starts
from tests.threads.forks import NAMED, RIGHT, SCENARIOS

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = {
    "in_an_eager_step": NAMED,
    "in_a_capture": NAMED,
    "in_a_lazy_capture": NAMED,
    "in_a_trial": NAMED,
    "in_a_warm_up_elsewhere": NAMED,
    "in_a_capture_elsewhere": NAMED,
    "in_the_compiler": RIGHT,
    "closed_in_a_child": RIGHT,
}


def told_by(scenario: str) -> str:
    """What a scenario prints, in a process of its own: children of pytest's would be pytest."""
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = starts.run("-m", "tests.threads.forks", scenario, cwd=ROOT, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_every_fork_scenario_has_an_expected_result() -> None:
    assert {*EXPECTED, "of_a_device", "of_a_gpu", "in_the_middle"} == {*SCENARIOS}


@pytest.mark.parametrize("scenario", EXPECTED)
def test_a_forked_child_raises_with_the_reason_for_each_scenario(scenario: str) -> None:
    assert told_by(scenario) == EXPECTED[scenario]


@pytest.mark.parametrize("device", ["device", pytest.param("gpu", marks=pytest.mark.cuda)])
def test_a_forked_child_never_touches_its_parents_device(device: str) -> None:
    assert ast.literal_eval(told_by(f"of_a_{device}")) == [*[NAMED] * 4, RIGHT]


def test_children_forked_during_steps_neither_hang_nor_give_wrong_results() -> None:
    results = ast.literal_eval(told_by("in_the_middle"))
    assert {*results} == {NAMED}, results
