"""The harness of tests/trust: when an outcome counts as right, named, late or silent."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

from graphrt.errors import GraphRTError, PlanChangedWarning
from tests.trust.defects import DEFECTS, main
from tests.trust.scenario import Scenario, defect
from tests.trust.twins import Record, run


class AboutTrustWarning(UserWarning):
    __module__ = "graphrt.errors"


def outcome(said_at: int | None, wrong: list[int]) -> tuple[str, int, int]:
    record = Record()
    if said_at is not None:
        record.say(said_at, "said")
    record.wrong = wrong
    found = record.outcome(hits=0)
    return found.word, found.wrong_before, found.wrong_after


@pytest.mark.parametrize(
    ("said_at", "wrong", "word"),
    [
        (None, [], ("right", 0, 0)),
        (None, [3, 4], ("silent", 2, 0)),
        (-1, [], ("named", 0, 0)),
        (3, [3, 4], ("named", 0, 2)),
        (4, [3], ("late", 1, 0)),
        (4, [2, 3, 5], ("late", 2, 1)),
    ],
)
def test_an_outcome_counts_wrong_outputs_before_and_after_the_warning(said_at, wrong, word):
    assert outcome(said_at, wrong) == word


def test_the_record_listens_only_to_trust_warnings_of_graphrt():
    record = Record()
    with record.listening(0):
        warnings.warn("torch's", UserWarning, stacklevel=1)
        warnings.warn("the plan's", PlanChangedWarning, stacklevel=1)
    assert record.said_at is None
    with record.listening(1):
        warnings.warn("of a graph", AboutTrustWarning, stacklevel=1)
    assert record.said_at == 1 and "of a graph" in record.said


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (GraphRTError("named"), "named"),
        (RuntimeError("OverwrittenOutputError: torch's own text"), "named"),
        (RuntimeError("shapes do not match"), "crash"),
    ],
)
def test_an_error_not_raised_by_graphrt_counts_as_a_crash(error, word):
    record = Record()
    with pytest.raises(Exception, match=r"^$"), record.listening(2):
        raise error
    assert record.outcome(hits=0).word == word


@defect("settings", "right")
def leaves_everything_changed(device):
    os.environ["GRAPHRT_TESTS_LEFT"] = "1"

    def between(step):
        torch.set_default_dtype(torch.float64)
        torch.set_autocast_enabled("cpu", True)
        torch.use_deterministic_algorithms(True)

    return Scenario(lambda x: x + 1, between=between)


def test_running_a_defect_leaves_settings_of_torch_and_process_unchanged():
    before = torch.get_rng_state()
    run(leaves_everything_changed, "off")
    assert torch.get_default_dtype() is torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.are_deterministic_algorithms_enabled()
    assert "GRAPHRT_TESTS_LEFT" not in os.environ
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("each", DEFECTS, ids=lambda each: each.name)
def test_without_graphs_every_program_equals_its_eager_twin(each):
    if "cpu" not in each.devices or each.group == "compiled":
        pytest.skip("a program for other devices, or one that a compiler already changed")
    assert run(each, "off", mode="NONE").word == "right"


def test_the_table_of_defects_is_long_and_has_unique_names():
    assert len({each.name for each in DEFECTS}) == len(DEFECTS)
    assert sum(not each.clean for each in DEFECTS) >= 75
    assert sum(each.clean for each in DEFECTS) >= 12


def test_the_command_prints_a_line_for_each_requested_defect(capsys):
    main(["nonlocal number", "--levels", "off"])
    assert "closure" in capsys.readouterr().out
    main(["nonlocal number", "--levels", "off", "--json"])
    assert '"word": "silent"' in capsys.readouterr().out
