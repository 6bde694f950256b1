"""The whole demo, and the comparison that its verdict rests on."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from graphrt import BatchDescriptor, Dispatch, GraphMode, Reason
from graphrt.core.base.errors import CheckpointError, InvalidBatchError, InvalidInputError
from graphrt.demo import app, report, run_demo
from graphrt.demo.engine import StepRecord
from graphrt.demo.report import Run, compare, group_steps, make_runner
from tests.demo.tiny_checkpoints import LLAMA, QWEN3, write


def demo(**options):
    text = io.StringIO()
    options = {"max_new_tokens": 4, "sizes": [8, 64]} | options
    code = run_demo(console=Console(file=text, width=120), **options)
    return code, text.getvalue()


def rows_of(text):
    """(mode, mixed steps) of each row of the table of steps."""
    cells = [[cell.strip() for cell in line.split("│")] for line in text.splitlines()]
    return [(row[1], int(row[5])) for row in cells if len(row) == 10 and row[5].isdigit()]


@pytest.mark.parametrize(
    ("mode", "decode", "mixed"),
    [
        (None, "FULL", "PIECEWISE"),
        ("FULL", "FULL", "FULL"),
        ("PIECEWISE", "PIECEWISE", "PIECEWISE"),
        ("FULL_DECODE_ONLY", "FULL", "NONE"),
        ("NONE", "NONE", "NONE"),
    ],
)
def test_the_demo_in_every_mode_equals_eager_and_uses_its_graphs(mode, decode, mixed):
    code, text = demo(mode=mode)
    assert code == 0
    assert text.rstrip().endswith("no graph was replayed" if mode == "NONE" else ": equal")
    assert " 0 differ (torch.equal)" in text
    rows = rows_of(text)
    assert {name for name, mixed_steps in rows if mixed_steps} == {mixed}
    assert {name for name, mixed_steps in rows if not mixed_steps} == {decode}


@pytest.mark.parametrize(
    "raw", [pytest.param(LLAMA, marks=pytest.mark.long), QWEN3], ids=["llama", "qwen3"]
)
def test_the_demo_runs_a_checkpoint_without_tokenizer_on_plain_bytes(tmp_path, raw):
    write(tmp_path, raw)
    code, text = demo(model=tmp_path, sizes=[64])
    assert code == 0
    assert "as plain bytes" in " ".join(text.split())


def test_the_demo_with_eager_replays_no_graph():
    code, text = demo(eager=True)
    assert code == 0
    assert {name for name, _ in rows_of(text)} == {"NONE"}
    assert "torch.equal" not in text


def test_a_prompts_file_that_is_missing_or_too_long_is_refused(tmp_path):
    file = tmp_path / "prompts"
    file.write_text("one [bold]\n\ntwo\n")
    _, text = demo(prompts=file, eager=True)
    assert "one [bold]" in text and "two" in text
    for content in ("", "\n \n"):
        file.write_text(content)
        with pytest.raises(InvalidInputError, match="empty"):
            demo(prompts=file)
    with pytest.raises(InvalidInputError, match="nowhere"):
        demo(prompts=tmp_path / "nowhere")
    file.write_text("x" * 300)
    with pytest.raises(InvalidBatchError, match="301 prompt tokens"):
        demo(prompts=file)


def test_a_model_folder_without_config_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        demo(model=tmp_path)


def test_a_difference_from_eager_prints_not_equal_and_exits_with_1(monkeypatch):
    def forged(setup, options, **rest):
        run = honest(setup, options, **rest)
        if rest.get("eager"):
            run.steps[3].logits[0, 5] += 1e-6
        return run

    honest = app.run_prompts
    monkeypatch.setattr(app, "run_prompts", forged)
    code, text = demo(mode="FULL", sizes=[64])
    assert code == 1
    assert " 1 differ (torch.equal)" in text and text.rstrip().endswith("NOT EQUAL")


def test_demo_graphs_are_tried_at_capture_and_not_in_served_steps(monkeypatch):
    made = []

    def kept(setup, options):
        made.append(make_runner(setup, options))
        return made[-1]

    monkeypatch.setattr(report, "make_runner", kept)
    served = []
    honest = report.Engine.step

    def step_of(engine):
        trials = [each.steps for each in engine.runner.report().trust.trials]
        served.append(sum(trials))
        honest(engine)

    monkeypatch.setattr(report.Engine, "step", step_of)
    assert demo(sizes=[1, 2, 4, 8, 16, 24, 32, 48, 64])[0] == 0
    assert len(made) == 3
    first = served[: len(served) // 3]
    assert first[0] >= 4 and len(set(first)) == 1


def step(mode=GraphMode.FULL, size=4, tokens=3, logits=None):
    dispatch = Dispatch(mode, BatchDescriptor(size), Reason.HIT)
    return StepRecord(dispatch, tokens, tokens, 0.5, logits)


def test_compare_counts_differing_rows_steps_and_nan():
    ones = torch.ones(3, 5)
    run = Run([[1, 2], [3]], [step(logits=ones)])
    assert compare(run, Run([[1, 2], [3]], [step(logits=ones.clone())])).equal
    other = ones.clone()
    other[1, 2] = 1 + 2**-23
    result = compare(run, Run([[1, 4], [3, 9]], [step(logits=other)]))
    assert (result.tokens, result.wrong_tokens) == (4, 2)
    assert (result.rows, result.wrong_rows) == (3, 1)
    assert result.same_steps and not result.equal
    assert compare(run, Run([[1, 2], [3]], [step(logits=ones)] * 2)).wrong_rows == 3
    assert not compare(run, Run([[1, 2], [3]], [step(size=8, logits=ones)])).equal
    nan = Run([[1, 2], [3]], [step(logits=ones * torch.nan)])
    assert not compare(nan, nan).equal


def test_demo_steps_are_grouped_and_speed_counts_generated_tokens_per_second():
    steps = [step(size=8), step(GraphMode.PIECEWISE), step(), step(size=8)]
    groups = group_steps(steps)
    assert [(g[0].dispatch.mode.name, len(g)) for g in groups] == [
        ("FULL", 1), ("FULL", 2), ("PIECEWISE", 1),
    ]  # fmt: skip
    assert Run([[1, 2], [3, 4]], steps).tokens_per_s == 2.0
