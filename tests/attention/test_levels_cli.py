"""`graphrt attention`, and known backends in `graphrt plan`, as a newcomer meets them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from graphrt.attention import known_backend, known_backends
from graphrt.cli.app import app, main


def run(*arguments: str, columns: int = 80) -> str:
    result = CliRunner().invoke(
        app, list(arguments), catch_exceptions=False, env={"COLUMNS": str(columns)}
    )
    assert result.exit_code == 0, result.output
    return result.output


def plan(*arguments: str) -> dict:
    return json.loads(run("plan", "--max-num-reqs", "4", *arguments, "--json"))


def error_of(monkeypatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", ["graphrt", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    text = capsys.readouterr().err
    assert "InvalidOptionError" in text and "try:" in text and "Traceback" not in text
    return text


@pytest.mark.parametrize("columns", [80, 160])
def test_every_backend_and_level_is_on_one_line_of_the_table(columns):
    lines = run("attention", columns=columns).splitlines()
    assert max(map(len, lines)) <= columns
    for backend in known_backends():
        (line,) = [each for each in lines if each.split(" ")[0] == backend.name]
        assert backend.levels[0].support.name in line


def test_the_table_of_levels_does_not_break_condition_names():
    text = run("attention")
    assert "decode_context_parallel" in text
    assert "trtllm_kernels, causal" in text


def test_marks_in_the_table_of_levels_are_explained_below():
    lines = run("attention").splitlines()
    assert any("flash-attention-2" in line and "UNIFORM_BATCH*" in line for line in lines)
    assert any(line.startswith("ascend-fia +") for line in lines)
    assert any(line.startswith("* ") for line in lines)
    assert any(line.startswith("+ ") and "tasks" in line for line in lines)


@pytest.mark.parametrize(
    ("backend", "level"),
    [
        ("flashinfer", "UNIFORM_SINGLE_TOKEN_DECODE"),
        ("flashinfer:trtllm_kernels=true", "UNIFORM_BATCH"),
        ("FLASHINFER:trtllm_kernels=TRUE,causal=false", "UNIFORM_SINGLE_TOKEN_DECODE"),
        ("dsa-indexer:varlen-kernels", "ALWAYS"),
    ],
)
def test_one_backend_shows_the_level_that_applies(backend, level):
    marked = [line for line in run("attention", backend).splitlines() if line.startswith(">")]
    assert len(marked) == 1
    assert f" {level} " in marked[0]
    data = json.loads(run("attention", backend, "--json"))
    assert data["levels"][data["level"]]["support"] == level


def test_one_backend_shows_reasons_aliases_source_and_facts():
    text = run("attention", "FA2", columns=200)
    assert "flash-attention-2, as in vLLM" in text
    assert "Also called: fa2" in text
    assert known_backend("fa2").levels[0].why in text
    assert "causal=true by default" in run("attention", "flashinfer")
    assert "tasks" in run("attention", "ascend-fia")


def test_json_lists_levels_and_conditions():
    data = {each["name"]: each for each in json.loads(run("attention", "--json"))}
    assert data.keys() == {backend.name for backend in known_backends()}
    assert data["flashinfer"]["levels"][0]["when"] == {"decode_context_parallel": 2}
    assert data["flashinfer"]["levels"][-1]["when"] == {}
    assert data["ascend-fia"]["task_update"] is True


@pytest.mark.parametrize(
    ("given", "attention", "mode"),
    [
        (["fa3"], {"flash-attention-3": "ALWAYS"}, "FULL"),
        (["flash_attention_2"], {"flash-attention-2": "UNIFORM_BATCH"}, "FULL_AND_PIECEWISE"),
        (["flashinfer"], {"flashinfer": "UNIFORM_SINGLE_TOKEN_DECODE"}, "PIECEWISE"),
        (
            ["flashinfer:trtllm_kernels=true"],
            {"flashinfer:trtllm_kernels=true": "UNIFORM_BATCH"},
            "FULL_AND_PIECEWISE",
        ),
        (
            ["fa3", "mine=NEVER"],
            {"flash-attention-3": "ALWAYS", "mine": "NEVER"},
            "PIECEWISE",
        ),
        (["flashinfer=ALWAYS"], {"flashinfer": "ALWAYS"}, "FULL"),
        (["layer:0=always"], {"layer:0": "ALWAYS"}, "FULL"),
        (["ALWAYS"], {"attention": "ALWAYS"}, "FULL"),
        (["NEVER", "ALWAYS"], {"attention": "NEVER"}, "PIECEWISE"),
    ],
)
def test_plan_takes_known_backends_and_given_levels(given, attention, mode):
    options = [option for text in given for option in ("--attention", text)]
    printed = plan("--mode", "FULL", "--query-len", "4", *options)
    assert printed["arguments"]["attention"] == attention
    assert printed["mode"] == mode


def test_plan_says_which_level_a_known_backend_has():
    text = run("plan", "--max-num-reqs", "4", "--attention", "fa2")
    assert "Attention: flash-attention-2 supports UNIFORM_BATCH" in text
    assert "Attention: ALWAYS" in run("plan", "--max-num-reqs", "4")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("UNIFORM_BACH", "UNIFORM_SINGLE_TOKEN_DECODE"),
        ("mine=UNIFORM_BACH", "--attention mine=UNIFORM_BATCH"),
        ("flash-attn", "flash-attention-3"),
        ("flashinfer:trtllm=true", "unknown fact"),
        ("flashinfer:causal=maybe", "True or False"),
        ("flashinfer:decode_context_parallel=0", "a number from 1"),
    ],
)
def test_plan_refuses_an_attention_that_is_neither_level_nor_backend(
    given, told, monkeypatch, capsys
):
    assert told in error_of(monkeypatch, capsys, "plan", "--attention", given)


def test_an_unknown_backend_is_a_named_error(monkeypatch, capsys):
    assert "'flashinfr'" in error_of(monkeypatch, capsys, "attention", "flashinfr")
