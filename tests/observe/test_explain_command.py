"""`graphrt explain`: the obstacles of a forward, the state that it found, and the code to use."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from graphrt import InputSpec
from graphrt.cli.app import app
from graphrt.cli.explain import _input
from graphrt.core.base.errors import InvalidInputError, InvalidOptionError
from graphrt.observe import explain

WEIGHT, COUNT = torch.randn(8, 8), torch.zeros(1)
INPUT = "x=float32[tokens,8]"
HERE = f"{__name__}:"


def plain(x):
    COUNT.add_(1)
    return torch.relu(x @ WEIGHT)


def with_three_obstacles(x):
    h = x @ WEIGHT
    torch.nonzero(h[:, 0] > 1e9)
    torch.masked_select(h, h > 1e9)
    kept = torch.nonzero(h[:, 1] > 1e9)
    return torch.relu(h) + kept.shape[0]


def with_a_number(x):
    return x * (1 + x.sum().item())


def mixing(x):
    return x - x.mean(0)


def made():
    return torch.nn.Linear(8, 8)


class AModule(torch.nn.Module):
    def forward(self, x):
        return x


not_a_forward = 3


def unmade():
    raise OSError("no weights here")


def unmade_by(config):
    return torch.nn.Linear(config.width, 8)


def made_number():
    return 3


def leaving(x):
    raise SystemExit(7)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["explain", *arguments], catch_exceptions=False)
    return result.exit_code, result.output


def test_explain_of_a_plain_forward_reports_no_obstacles():
    code, text = run(f"{HERE}plain", "--input", INPUT, "--platform", "cpu")
    assert code == 0
    assert "Nothing stands in the way of one graph (FULL)." in text
    assert "Captured as FULL: a step is 1 graph, 0 eager parts" in text
    assert "It reads: global WEIGHT (256 B)" in text and "It writes: global COUNT (4 B)" in text
    assert "The replay equals the forward." in text


def test_an_explanation_ends_with_the_table_of_times_that_a_report_has():
    """Also one without gain: an addition takes as long as a replay."""
    _, text = run(f"{HERE}plain", "--input", INPUT, "--platform", "cpu", "--tokens", "3")
    titles, row = text.rstrip().splitlines()[-2:]
    assert titles.split() == ["graph", "by", "graph", "eager", "gain"]
    time_of = r"[\d.]+ (us|ms)"
    gain = rf"([\d.]+ times|no gain: eager takes {time_of})"
    assert re.fullmatch(rf"FULL \[3 tokens 3 reqs\] +{time_of} +{time_of}  {gain}", row)
    one = replace(
        explain(plain, {"x": InputSpec(torch.float32, ("tokens", 8))}, platform="cpu"),
        graph_s=4e-6,
        eager_s=3e-6,
    )
    assert str(one).splitlines()[-1].split("  ")[-1] == "no gain: eager takes 3 us"
    assert str(replace(one, eager_s=8e-6)).splitlines()[-1].endswith("2.0 times")


def test_the_code_in_an_explanation_builds_a_working_runner():
    for forward, mode in ((plain, "FULL"), (with_three_obstacles, "PIECEWISE")):
        inputs = {"x": InputSpec(torch.float32, ("tokens", 8))}
        explanation = explain(forward, inputs, platform="cpu")
        names = {"forward": forward, "torch": torch}
        exec(explanation.code, names)
        x = torch.randn(5, 8)
        assert torch.equal(names["runner"](x=x), forward(x))
        assert explanation.mode == names["runner"].mode.name == mode


@pytest.mark.parametrize(("target", "more"), [("plain", ()), ("made", ("--made",))])
def test_the_printed_code_of_graphrt_explain_runs_unchanged(target, more):
    inputs = INPUT if target == "plain" else "input=float32[tokens,8]"
    _, text = run(f"{HERE}{target}", "--input", inputs, *more, "--platform", "cpu")
    names: dict[str, Any] = {}
    code, _, _ = text[text.index(f"from {__name__} import") :].partition("\n\n")
    exec(code, names)
    assert len(names["runner"].report().graphs) == 1


def test_explain_names_every_obstacle_operator_with_its_source_line():
    inputs = {"x": InputSpec(torch.float32, ("tokens", 8))}
    explanation = explain(with_three_obstacles, inputs, platform="cpu")
    # Each operator once: the pieces around the first one are those around the others, too.
    assert [each.op for each in explanation.obstacles] == [
        "aten.nonzero.default",
        "aten.masked_select.default",
    ]
    assert all("test_explain_command.py:" in (each.source or "") for each in explanation.obstacles)
    assert explanation.breaks == ("aten::nonzero", "aten::masked_select")
    assert (explanation.graphs, explanation.eager_parts, explanation.trial) == (4, 3, None)


@pytest.mark.parametrize(
    ("name", "why"), [("mixing", "without padding"), ("with_a_number", "returned another value")]
)
def test_explain_of_an_uncapturable_forward_gives_the_reason_and_no_code(name, why):
    code, text = run(f"{HERE}{name}", "--input", INPUT, "--platform", "cpu")
    assert code == 1 and "But no graph stands for it yet: " in text and why in text
    assert "GraphRunner(" not in text


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("def f(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("class Odd(BaseException): pass\nraise Odd(4)", "Odd: 4"),
    ],
)
def test_a_module_that_fails_at_its_import_is_named_with_its_error(
    source, what, tmp_path, monkeypatch
):
    (tmp_path / "failing_at_import.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidOptionError, match=f"no such forward(.|\n)*{what}"):
        run("failing_at_import:f", "--input", INPUT)


def test_explain_accepts_a_factory_target_and_prints_json():
    weights = run(f"{HERE}made", "--made", "--input", "input=float32[tokens,8]", "--json")
    data = json.loads(weights[1])
    assert (data["mode"], data["obstacles"], data["trial"]) == ("FULL", [], None)
    assert len(data["reads"]) == 2 and data["graph_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([f"{HERE}absent", "--input", INPUT], "no such forward"),
        (["no_such_module:f", "--input", INPUT], "no such forward"),
        ([__name__, "--input", INPUT], "no such forward"),
        ([f"{HERE}not_a_forward", "--input", INPUT], "the target cannot be called"),
        ([f"{HERE}AModule", "--input", INPUT], "the target is a class"),
        ([f"{HERE}plain", "--input", "x"], "--input cannot be read"),
        ([f"{HERE}plain", "--input", "x=float[tokens;8]"], "--input cannot be read"),
        ([f"{HERE}plain", "--input", "x=relu[tokens]"], "--input cannot be read"),
        ([f"{HERE}plain", "--input", "x=float32[\u00b2]"], "--input cannot be read"),
        ([f"{HERE}plain", "--input", f"x=float32[{'9' * 5000}]"], "--input|shape"),
        ([f"{HERE}plain", "--input", "x=quint8[tokens]"], "wrong dtype"),
        (
            [f"{HERE}plain", "--input", "x=float8_e4m3fn[tokens,8]"],
            "fails on such inputs(.|\n)*plain",
        ),
        (
            [f"{HERE}plain", "--input", "x=float32[tokens,7]"],
            "fails on such inputs(.|\n)*RuntimeError",
        ),
        ([f"{HERE}made", "--made", "--input", "input=float8_e8m0fnu[tokens,8]"], "fails on such"),
        ([f"{HERE}unmade", "--made", "--input", INPUT], "cannot be made(.|\n)*OSError: no weights"),
        ([f"{HERE}unmade_by", "--made", "--input", INPUT], "cannot be made(.|\n)*'config'"),
        ([f"{HERE}made_number", "--made", "--input", INPUT], "cannot be called(.|\n)*an? int"),
        ([f"{HERE}leaving", "--input", INPUT], "fails on such inputs(.|\n)*SystemExit: 7"),
        ([".x:f", "--input", INPUT], "no such forward"),
        (["..:f", "--input", INPUT], "no such forward"),
    ],
)
def test_explain_refuses_invalid_targets_and_inputs_by_name(arguments, what):
    with pytest.raises((InvalidOptionError, InvalidInputError), match=what):
        run(*arguments)


@given(st.text() | st.from_regex(r"\w+=(float32|int64|bool|\w+)\[[\w+, ]*\]", fullmatch=True))
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of dtypes that end
def test_any_text_of_an_input_is_read_or_refused_by_name(text):
    with suppress(InvalidOptionError, InvalidInputError):
        _input(text)


def test_explain_of_a_module_class_asks_for_an_instance():
    with pytest.raises(InvalidInputError, match=r"try: pass an instance: AModule\(\.\.\.\)"):
        explain(AModule, {"x": InputSpec(torch.float32, ("tokens", 8))}, platform="cpu")  # type: ignore[arg-type]


def test_explain_makes_example_inputs_with_the_rows_of_their_axes():
    def summed(x, lengths, starts):
        return x * (lengths + starts[1:]).unsqueeze(1)

    inputs = {
        "x": InputSpec(torch.float32, ("rows", 8)),
        "lengths": InputSpec(torch.int64, ("reqs",)),
        "starts": InputSpec(torch.int64, ("reqs+1",)),
    }
    explanation = explain(summed, inputs, tokens=4, platform="cpu")
    assert (explanation.mode, explanation.trial, explanation.obstacles) == ("FULL", None, ())
