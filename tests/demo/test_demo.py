"""The whole demo, and the comparison that its verdict rests on."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from graphrt import Batch, BatchDescriptor, Dispatch, GraphMode, GraphOptions, Reason, get_platform
from graphrt.core.base.errors import CheckpointError, InvalidBatchError, InvalidInputError
from graphrt.demo import Decoder, EngineLimits, Setup, app, run_demo, seeded_checkpoint
from graphrt.demo.engine import StepRecord
from graphrt.demo.measured import ON_A_GPU, SOURCE
from graphrt.demo.report import Run, compare, example_step, group_steps, make_runner, serve_prompts
from graphrt.demo.steady import SteadySize, cause_of
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


def steady_rows(text):
    """graph -> ms of a step by it, eager ms, gain, cause."""
    cells = [[cell.strip() for cell in line.split("│")] for line in text.splitlines()]
    return {row[1]: row[2:6] for row in cells if len(row) == 7 and row[4].endswith(" x")}


def seeded_setup(mode=None, sizes=(4, 16, 64), prompts=()):
    checkpoint, limits = seeded_checkpoint(), EngineLimits()
    context = limits.pages(limits.context) * limits.page_size
    decoder = Decoder(checkpoint.config, checkpoint.weights, context)
    graphs = {"sizes": sizes} if mode is None else {"sizes": sizes, "mode": mode}
    prompts = [list(prompt) for prompt in prompts]
    return Setup(decoder, get_platform("cpu"), limits, prompts, 4, frozenset(), graphs)


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
    # Each graph has a row of steady steps.
    with make_runner(seeded_setup(mode, (8, 64)), GraphOptions()) as runner:
        planned = {f"{key.name} {descriptor.num_tokens}" for key, descriptor in runner.plan.keys}
    assert set(steady_rows(text)) == planned


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
    def forged(setup, runner, **rest):
        run = honest(setup, runner, **rest)
        if rest.get("eager") and rest.get("keep_logits"):
            run.steps[3].logits[0, 5] += 1e-6
        return run

    honest = app.serve_prompts
    monkeypatch.setattr(app, "serve_prompts", forged)
    code, text = demo()
    assert code == 1
    assert " 1 differ (torch.equal)" in text and text.rstrip().endswith("NOT EQUAL")


@pytest.mark.parametrize("sizes", [(1, 2, 4, 8, 16, 24, 32, 48, 64), (2, 32), (64,)])
def test_demo_graphs_are_tried_at_capture_and_not_in_served_steps(sizes):
    prompts = [[256, *text.encode()] for text in app._PROMPTS]
    # Zeros too: they are the padding of tokens and positions.
    setup = seeded_setup(sizes=sizes, prompts=[*prompts, [0, 0, 0], [0]])
    with make_runner(setup, GraphOptions()) as runner:
        runner.capture()
        assert any(trial.steps for trial in runner.report().trust.trials)
        run = serve_prompts(setup, runner)
    assert {step.dispatch.mode.name for step in run.steps} >= {"PIECEWISE"}
    assert not any(step.tried for step in run.steps)


def test_trials_of_served_steps_have_rows_of_their_own(monkeypatch):
    monkeypatch.setenv("GRAPHRT_CHECK", "always")
    code, text = demo()
    assert code == 0
    assert "HIT, trial" in text and not [row for row in text.splitlines() if "│ HIT  " in row]


def test_the_first_request_of_an_example_step_has_the_values_of_padding():
    setup = seeded_setup()
    for batch in (Batch(63, 4), Batch(7, 7, 1)):
        values = example_step(setup, batch, torch.Generator().manual_seed(0)).values
        for name in ("input_ids", "positions"):
            assert values[name][0] == 0 and values[name].any(), name


def test_the_demo_leaves_the_page_of_its_run_and_says_where(tmp_path):
    page = tmp_path / "demo.html"
    code, text = demo(html=page)
    assert code == 0
    assert f"The page of this run: {page}" in "".join(text.splitlines())
    html = page.read_text(encoding="utf-8")
    assert "graphrt demo: FULL_AND_PIECEWISE on cpu" in html and "<svg" in html
    # The times of all graphs are on it, as on the terminal, and the steps of one serving alone.
    assert "Time of a step over its size" in html and "timed. runner.measure" not in html
    replays = sum(map(int, re.findall(r"<title>(\d+) replays</title>", html)))
    assert f"; {replays} steps replayed a graph" in " ".join(text.split())


def test_the_demo_on_a_cpu_says_what_a_gpu_gave():
    _, text = demo()
    said = " ".join(text.split())
    assert "The CPU platform is for tests and development without a GPU." in said
    assert str(ON_A_GPU) in said


def test_the_figures_of_a_gpu_are_those_of_the_benchmark():
    measured = json.loads((Path(__file__).parents[2] / SOURCE).read_text())
    there = measured["environment"]
    assert ON_A_GPU[:2] == (there["device"], there["torch"])
    assert there["date"].startswith(ON_A_GPU.date)
    batches = measured["results"]["1b"]["batches"]
    for batch, gain in ON_A_GPU.gains.items():
        times = batches[str(batch)]["ms"]
        assert gain == round(times["eager"]["step"] / times["graphrt FULL"]["step"], 1)


def test_a_size_at_which_a_graph_is_not_faster_says_why_in_five_words():
    def size(mode, graph_s, eager_s, noise_s=0.0):
        return SteadySize(mode, 4, graph_s, eager_s, noise_s)

    full, pieces = GraphMode.FULL, GraphMode.PIECEWISE
    small = size(full, 1.0, 2.0)
    slower = [size(full, 9.0, 8.5, 1.0), size(full, 9.0, 8.0), size(pieces, 3.0, 2.0)]
    causes = [cause_of(each, [small, *slower]) for each in [*slower, size(full, 3.0, 2.0)]]
    assert cause_of(small, [small]) == ""
    assert len(set(causes)) == 4 and {len(cause.split()) for cause in causes} == {5}


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
