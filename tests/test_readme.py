"""The pages of the documents run as they stand, and what the documents name exists."""

from __future__ import annotations

import re
import socket
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from examples.engine.config import EngineConfig, Sampling
from examples.engine.engine import Engine
from examples.engine.model import DecoderConfig, seeded
from graphrt import Reason
from graphrt.core.base._native_door import NativeWatch, native_state

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
]
FOLDERS = ("graphrt", "packages", "tests", "benchmarks", "examples", "docs", "ci")
OF_ITS_OWN = {
    "docs/how-to/observing.md": "tests/observe/test_page_of_docs.py",
}
"""Pages that a test elsewhere runs, which knows more of them."""


class Block(NamedTuple):
    code: str
    line: int
    not_run: str | None
    """Why it cannot be run here, from a comment of the page above it."""
    first: str
    """What has to be there before, from a comment that readers do not see."""


BLOCK = re.compile(
    r"(?:^ *<!-- not run: (?P<why>[^\n]+) -->\n+)?(?:^<!-- first:\n(?P<first>[^>]*?)-->\n+)?"
    r"^(?P<indent> *)```python\n(?P<code>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str) -> list[Block]:
    text = text_of(document)
    return [
        Block(
            textwrap.dedent(match["code"]),
            text.count("\n", 0, match.start("code")) + 1,
            match["why"],
            match["first"] or "",
        )
        for match in BLOCK.finditer(text)
    ]


def example_with(part: str, document: str = "README.md") -> str:
    (example,) = [block.code for block in blocks(document) if part in block.code]
    return example


WITH_BLOCKS = [each for each in DOCUMENTS if blocks(each) and each not in OF_ITS_OWN]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A page is a program on the CPU, in a folder of its own: the one rank of its group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in {"GRAPHRT_PLATFORM": "cpu", **ranks}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("document", WITH_BLOCKS)
def test_the_code_blocks_of_each_page_run_and_print_as_documented(
    document: str,
    alone: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    """In their order, as one program. A comment behind a `print` is what it prints, and a block
    with a comment `# raises Name` ends in that error."""
    page = ModuleType("page_of_the_documents")
    monkeypatch.setitem(sys.modules, page.__name__, page)
    for block in blocks(document):
        for library in re.findall(
            r"^import (?:torch, )?(transformers|diffusers)$", block.first + block.code, re.M
        ):
            pytest.importorskip(library, reason=f"{document} needs it")
        # A file of its own, as what compiles a function reads its source.
        script = tmp_path / f"line_{block.line}.py"
        script.write_text(block.code, encoding="utf-8")
        program = compile(block.code, str(script), "exec")
        if block.not_run is not None:
            continue
        raised = re.search(r"# raises (\w+Error)\b", block.code)
        exec(block.first, vars(page))
        if raised is None:
            exec(program, vars(page))
        else:
            with pytest.raises(Exception) as caught:  # noqa: PT011
                exec(program, vars(page))
            assert caught.type.__name__ == raised[1]
        printed = capsys.readouterr().out.splitlines()
        assert said(block.code, printed) == printed


def said(code: str, printed: list[str]) -> list[str]:
    """What the comments of a block say it prints; where none is, whatever was printed."""
    comments = re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE)
    return comments or printed


def test_each_page_with_its_own_test_is_named_in_that_test():
    for document, test in OF_ITS_OWN.items():
        assert Path(document).name in text_of(test)


def test_only_the_ascend_page_has_code_blocks_that_are_not_run():
    left_out = [(each, block) for each in DOCUMENTS for block in blocks(each) if block.not_run]
    assert {each for each, _ in left_out} <= {"docs/how-to/ascend.md"}


def test_the_first_readme_example_runs_and_replays(alone: None, capsys: pytest.CaptureFixture[str]):
    code = example_with("graphed(")
    assert "in two lines" in text_of("README.md") and len(re.findall("fast", code)) == 3
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == "torch.Size([3, 10]) HIT\n"


def test_the_printed_plan_equals_the_text_on_the_modes_page(
    alone: None, capsys: pytest.CaptureFixture[str]
):
    page = "docs/concepts/modes.md"
    exec(compile(example_with("print(plan)", page), page, "exec"), {})
    printed = textwrap.indent(capsys.readouterr().out, " " * 4)
    assert f"```\n\n{printed}\n" in text_of(page)


def test_the_documented_host_with_its_own_wrappers_runs_and_replays(
    capsys: pytest.CaptureFixture[str],
):
    names: dict[str, Any] = {}
    page = "docs/how-to/engine.md"
    exec(compile(example_with("GraphDispatcher(", page), page, "exec"), names)
    assert capsys.readouterr().out == "1 0\n"
    assert names["dispatch"].reason.name == "HIT"
    assert len(names["wrapper"].entries) == 1
    expected = names["model"](names["static_input"].fill_(2.0)).clone()

    def eagerly(*args: Any) -> None:
        raise AssertionError("it was not replayed")

    names["model"].forward = eagerly
    with names["dispatcher"].step(names["Batch"](3, 3, 1)):
        assert names["torch"].equal(names["wrapper"](names["static_input"]), expected)


def test_the_documented_host_without_lazy_capture_counts_missing_graphs():
    page = "docs/how-to/engine.md"
    code = example_with("GraphDispatcher(", page).replace("lazy=True", "")
    names: dict[str, Any] = {}
    exec(compile(code, page, "exec"), names)
    counts = names["dispatcher"].counts()
    assert (counts[names["Reason"].HIT], counts[names["Reason"].MISSING_GRAPH]) == (0, 1)
    assert names["wrapper"].eager_calls[names["Reason"].MISSING_GRAPH] == 2


def test_the_documented_engine_with_its_own_context_runs_and_replays(
    capsys: pytest.CaptureFixture[str],
):
    page = "docs/how-to/engine.md"
    names: dict[str, Any] = {}
    exec(compile(example_with("pool.capture_session()", page), page, "exec"), names)
    assert capsys.readouterr().out == "3 3\n"
    assert all(piece.sealed and len(piece.entries) == 1 for piece in names["pieces"])


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_and_link_in_the_documents_exists(document: str):
    text, folder = text_of(document), (ROOT / document).parent
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)", text)
    missing = [path for path in named if not (ROOT / path).exists()]
    for link in re.findall(r"\]\(([^)]+)\)", prose):
        # The reference is made with the site, which looks at its links itself.
        if link.startswith(("http", "#")) or re.match(r"(\.\./)*reference/", link):
            continue
        if not (folder / link.partition("#")[0]).exists():
            missing.append(link)
    assert missing == []


def test_the_troubleshooting_page_lists_every_public_error_and_warning():
    import graphrt.errors

    _, table = text_of("docs/troubleshooting.md").split("## Errors and warnings")
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(rows) == sorted(graphrt.errors.__all__)


def test_the_troubleshooting_page_lists_every_dispatch_reason():
    from graphrt import Reason

    text = text_of("docs/troubleshooting.md")
    assert [reason.name for reason in Reason if f"`{reason.name}`" not in text] == []


def test_pictures_in_docs_are_exactly_those_drawn_and_shown():
    (drawn,) = re.findall(r"^DRAWINGS: .* = \[(.*)\]$", text_of("docs/pictures.py"), re.MULTILINE)
    shown = [
        name for each in DOCUMENTS for name in re.findall(r"pictures/(\w+)\.svg", text_of(each))
    ]
    kept = [path.stem for path in (ROOT / "docs" / "pictures").iterdir()]
    assert sorted(kept) == sorted(shown) == sorted(drawn.split(", "))


@pytest.mark.filterwarnings("ignore::graphrt.errors.GraphQuarantinedWarning")
def test_the_readmes_row_of_this_python_says_when_changes_in_python_are_noticed():
    is_told = NativeWatch is not None
    rows = re.findall(
        r"^\| (3\.[\d., ]+) \| (.*within (\d+) steps.*) \|$", text_of("README.md"), re.M
    )
    by_python = {python: row for pythons, *row in rows for python in pythons.split(", ")}
    row, most = by_python[f"3.{sys.version_info.minor}" if native_state == "in use" else "3.10"]
    assert ("at the next step" in row) is is_told
    model = seeded(DecoderConfig())
    with Engine(model, EngineConfig(max_num_reqs=1, max_num_tokens=16)) as engine:
        runner = engine.model.runner
        steps = runner.report().trust.glance_steps
        assert int(most) == -(-steps // 10) * 10
        engine.submit([1, 2, 3], Sampling(200))
        for _ in range(8):
            engine.step()
        assert runner.last_dispatch.reason is Reason.HIT
        model.model.layers[-1].input_layernorm.eps = 0.5
        late = 0
        engine.step()
        while runner.last_dispatch.reason is Reason.HIT:
            late += 1
            engine.step()
    assert late == 0 if is_told else late <= steps
