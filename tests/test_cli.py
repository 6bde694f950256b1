"""The `graphrt` command as a newcomer meets it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from graphrt.cli.app import app, main
from graphrt.core.errors import InvalidModeError, InvalidSizesError


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_doctor_lists_every_built_in_platform_and_why_one_is_missing():
    report = json.loads(run("doctor", "--json"))
    found = {platform["name"]: platform for platform in report["platforms"]}
    assert {"cpu", "accelerator", "cuda", "ascend"} <= found.keys()
    assert found["cpu"]["available"]
    assert found["cpu"]["wrapper"] == "graphrt.cpu.CPUGraphWrapper"
    for platform in found.values():
        assert platform["available"] or platform["reason"]
    assert report["versions"]["torch"]


def test_doctor_prints_tables():
    text = run("doctor")
    assert "Current platform" in text
    assert "cpu" in text


def test_plan_shows_steps_sizes_and_graphs():
    arguments = ["--mode", "FULL", "--max-num-reqs", "8", "--query-len", "3"]
    arguments += ["--attention", "flash=UNIFORM_BATCH", "--attention", "mamba=ALWAYS"]
    plan = json.loads(run("plan", *arguments, "--json"))
    assert plan["mode"] == "FULL_AND_PIECEWISE"
    assert plan["steps"][0]["backend"] == "flash"
    assert plan["sizes"]["decode"] == {"3": [3, 6, 12, 24]}
    assert [g["num_tokens"] for g in plan["graphs"] if g["mode"] == "FULL"] == [24, 12, 6, 3]
    assert "flash" in run("plan", *arguments)


def test_plan_says_beforehand_which_decode_batches_will_be_too_large():
    assert "513 to 1024" in run("plan", "--max-num-reqs", "1024")


def test_settings_go_to_the_options():
    plan = json.loads(run("plan", "-c", "mode=FULL", "-c", "sizes=[1,2]", "--json"))
    assert (plan["mode"], plan["sizes"]["mixed"]) == ("FULL", [1, 2])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [(["--mode", "HALF"], InvalidModeError), (["--sizes", "4,2"], InvalidSizesError)],
)
def test_bad_settings_end_in_a_named_error_without_a_traceback(
    arguments, error, monkeypatch, capsys
):
    monkeypatch.setattr("sys.argv", ["graphrt", "plan", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    text = capsys.readouterr().err
    assert error.__name__ in text
    assert "Traceback" not in text


def test_the_demo_proves_itself():
    text = run("demo", "--max-new-tokens", "4", "--mode", "FULL")
    assert "equal" in text
    assert "NOT EQUAL" not in text
