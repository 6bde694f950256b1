"""Short forms of `python -m tests.long`."""

from __future__ import annotations

import pytest

from tests.long import run as long
from tests.long.level import Figures
from tests.long.models import Served

BESIDE = (
    "host with a wrapper",
    "compiled module",
    "threads, two pools",
    "threads, one pool",
    "runner that comes and goes",
)


@pytest.fixture(autouse=True)
def _few_samples(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("long") is None:
        # A sample walks over all objects of a process that has run other tests.
        request.getfixturevalue("frozen_heap")
        monkeypatch.setattr(long, "SAMPLES", 6)
        monkeypatch.setattr(long, "LEAST_RECAPTURE", 50)


def check(totals: long.Totals, steps: int) -> None:
    """Nothing was found, nothing rises, and everything that there is ran."""
    assert not totals.findings, "\n".join(totals.lines())
    assert not totals.rising(), "\n".join(totals.lines())
    assert totals.steps == steps and totals.exact > steps // 20
    ways = ("main FULL HIT", "main PIECEWISE HIT", "main NONE TOO_LARGE")
    for way in (*ways, *(f"{each}, adapters" for each in ways), "draft FULL HIT", *BESIDE):
        assert totals.ran[way], way


def test_random_steps_of_clean_models_give_no_finding():
    check(long.run(30, level="capture"), 30)


@pytest.mark.long
@pytest.mark.parametrize("level", ["always", "off"])
def test_random_steps_at_each_other_check_level_give_no_finding(level):
    check(long.run(2000, level=level), 2000)


@pytest.mark.long
def test_100_000_steps_give_no_finding_and_no_rising_figure():
    check(long.run(100_000), 100_000)


@pytest.mark.cuda
def test_random_steps_on_a_gpu_give_no_finding():
    check(long.run(400, "cuda", "always"), 400)


class Drifting(Served):
    """A count in Python that decides something, which no graph can follow."""

    def forward(self, **inputs):
        return super().forward(**inputs) + self.calls


def test_a_model_with_drifting_state_gives_a_quarantine_finding(monkeypatch):
    monkeypatch.setattr(long, "Served", Drifting)
    monkeypatch.setattr(long, "SAMPLES", 1)
    totals = long.run(10, level="always")
    assert any("GraphQuarantinedWarning" in each for each in totals.findings)
    assert any("was QUARANTINED" in each for each in totals.findings)


def test_a_step_wrong_by_a_single_bit_gives_a_finding(monkeypatch):
    def off_by_one_bit(self: long.Run) -> list[object]:
        state = kept(self)
        self._served.steps.add_(1)
        return state

    kept = long.Run._state
    monkeypatch.setattr(long.Run, "_state", off_by_one_bit)
    monkeypatch.setattr(long, "SAMPLES", 1)
    assert any("not what eager gives" in each for each in long.run(8).findings)


@pytest.mark.parametrize("findings", [[], ["one"]])
def test_the_long_command_prints_and_returns_the_number_of_findings(findings, capsys, monkeypatch):
    def run(*arguments: object, progress: bool) -> long.Totals:
        assert arguments == (3, "cpu", "off", 7)
        figures = Figures("cpu")
        for at in range(3):
            figures.sample(at, 0)
        return long.Totals(figures, steps=3, findings=findings)

    monkeypatch.setattr(long, "run", run)
    given = ["--steps", "3", "--level", "off", "--seed", "7"]
    assert long.main(given) == len(findings)
    assert f"findings: {len(findings)}" in capsys.readouterr().out
