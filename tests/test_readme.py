"""The examples of the documents run as they stand, and what the documents name exists."""

from __future__ import annotations

import re
import runpy
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
FOLDERS = ("graphrt", "packages", "tests", "benchmarks", "examples", "docs", "ci")


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def examples(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text_of(document), re.DOTALL)


def example_with(part: str, document: str = "README.md") -> str:
    (example,) = [code for code in examples(document) if part in code]
    return example


def test_the_fifteen_lines_run_as_they_stand(capsys):
    code = examples("README.md")[0]
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 15
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == "torch.Size([3, 10]) HIT\n"


def test_the_plan_prints_what_the_readme_shows(capsys):
    exec(compile(example_with("print(plan)"), "README.md", "exec"), {})
    printed = textwrap.indent(capsys.readouterr().out, " " * 4)
    assert f"```\n\n{printed}\n" in text_of("README.md")


def test_attention_in_the_graph_runs_as_it_stands(capsys):
    names: dict[str, object] = {}
    for part in ("SdpaAttention", "runner.verify"):
        exec(compile(example_with(part, "docs/attention.md"), "attention.md", "exec"), names)
    assert capsys.readouterr().out == "FULL_AND_PIECEWISE FULL\n"


def test_a_host_with_wrappers_of_its_own_runs_as_it_stands(capsys):
    names: dict[str, Any] = {}
    exec(compile(example_with("GraphDispatcher(", "docs/hosts.md"), "hosts.md", "exec"), names)
    assert capsys.readouterr().out == "1 0\n"
    assert names["dispatch"].reason.name == "HIT"
    assert len(names["wrapper"].entries) == 1
    expected = names["model"](names["static_input"].fill_(2.0)).clone()

    def eagerly(*args: Any) -> None:
        raise AssertionError("it was not replayed")

    names["model"].forward = eagerly
    with names["dispatcher"].step(names["Batch"](3, 3, 1)):
        assert names["torch"].equal(names["wrapper"](names["static_input"]), expected)


def test_without_lazy_capture_the_same_host_is_told_that_nothing_is_replayed():
    code = example_with("GraphDispatcher(", "docs/hosts.md").replace("lazy=True", "")
    names: dict[str, Any] = {}
    exec(compile(code, "hosts.md", "exec"), names)
    counts = names["dispatcher"].counts()
    assert (counts[names["Reason"].HIT], counts[names["Reason"].MISSING_GRAPH]) == (0, 1)
    assert names["wrapper"].eager_calls[names["Reason"].MISSING_GRAPH] == 2


def test_the_compiled_model_runs_as_it_stands(capsys, tmp_path):
    (code,) = examples("docs/compile.md")
    script = tmp_path / "walk.py"
    script.write_text(code)
    runpy.run_path(str(script))
    assert capsys.readouterr().out == "5 3\n"


def test_an_engine_with_a_context_of_its_own_runs_as_it_stands(capsys):
    code = example_with("pool.capture_session()", "docs/hosts.md")
    names: dict[str, Any] = {}
    exec(compile(code, "hosts.md", "exec"), names)
    assert capsys.readouterr().out == "3 3\n"
    assert all(piece.sealed and len(piece.entries) == 1 for piece in names["pieces"])


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_and_links_lead_somewhere(document):
    text, folder = text_of(document), (ROOT / document).parent
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)", text)
    missing = [path for path in named if not (ROOT / path).exists()]
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if not link.startswith(("http", "#")) and not (folder / link.partition("#")[0]).exists():
            missing.append(link)
    assert missing == []
