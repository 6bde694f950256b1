"""Short forms of `python -m tests.long`."""

from __future__ import annotations

import pytest

from tests.long.models import Served
from tests.trust import long

LENGTHS = [("cpu", 150), pytest.param("cuda", 300, marks=pytest.mark.cuda)]


@pytest.mark.parametrize(("device", "steps"), LENGTHS)
def test_random_steps_of_clean_models_at_always_come_to_no_finding(device, steps):
    totals = long.run(steps, device)
    assert not totals.findings, "\n".join(totals.lines())
    assert totals.steps == steps
    ways = ("main FULL HIT", "main PIECEWISE HIT", "main NONE TOO_LARGE")
    for way in (*ways, *(f"{each}, adapters" for each in ways), "draft FULL HIT"):
        assert totals.ran[way], way


class Drifting(Served):
    """A count in Python that decides something, which no graph can follow."""

    def forward(self, **inputs):
        return super().forward(**inputs) + self.calls


def test_a_model_that_is_not_clean_is_a_finding(monkeypatch):
    monkeypatch.setattr(long, "Served", Drifting)
    totals = long.run(10)
    assert any("GraphQuarantinedWarning" in each for each in totals.findings)
    assert any("was QUARANTINED" in each for each in totals.findings)


def test_tensors_that_gather_are_seen():
    totals = long.Totals(steps=10_000, tensors=[100, 200, 250, 250, 260])
    assert totals.levelled()
    totals.tensors += [1250]
    assert not totals.levelled()


def test_the_command_says_what_it_found(capsys):
    assert long.main(["--steps", "3", "--level", "capture"]) == 0
    assert "findings: 0" in capsys.readouterr().out
