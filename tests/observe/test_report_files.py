"""Files of reports and traces that somebody else wrote: a named error, or a report that a terminal
can print."""

from __future__ import annotations

import copy
import json
import os
import stat
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from graphrt.cli.app import app
from graphrt.core.base.errors import GraphRTError, InvalidOptionError
from graphrt.core.base.texts import printable
from graphrt.observe import load_report, page, report_text, trace, write_page
from graphrt.observe.files import runs_of
from graphrt.observe.memory import taken_and_predicted
from tests.observe.planted import places, planted_runner, run_planted, short_document

CLEAR = "\x1b[2J\x1b]0;owned\x07\r\x9b1A\u202e\u2028"
"""Clears a screen, renames its window, goes up a line, turns the direction of writing."""


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A trace with its report."""
    runner, path = planted_runner(), tmp_path_factory.mktemp("files") / "trace.json"
    with trace(path, runner):
        run_planted(runner)
    return short_document(path)


def report_of(document: dict[str, Any]) -> Any:
    return document["otherData"]["graphrt_reports"][0]


def replaced(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of `data` with another value in one place; without the place for `...`."""
    data = copy.deepcopy(data)
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    if value is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return data


def use(path: Path) -> str:
    """All that is made of a file, or the named error."""
    try:
        runs = runs_of(path)
        shown = [report_text(run.figures) + str(taken_and_predicted(run.figures)) for run in runs]
        page(path, path)
        return "\n".join(shown)
    except GraphRTError as error:
        return str(error)


def is_safe(text: str) -> bool:
    """Whether a terminal shows all of it, and obeys none of it."""
    kinds = {unicodedata.category(each) for each in text if each not in "\n\t"}
    return not kinds & {"Cc", "Cf", "Zl", "Zp"}


REPLACEMENTS = (
    ..., None, True, -1, 0, 1 << 70, 0.5, float("nan"), float("inf"), -1e300, "", CLEAR,
    [], {}, [[]], [None, None], {"a": 1}, [{"ph": "X"}],
)  # fmt: skip


@pytest.mark.parametrize("is_trace", [True, False], ids=["trace", "report"])
def test_any_replaced_field_of_a_file_gives_a_report_or_a_named_error(
    document: dict[str, Any], is_trace: bool, tmp_path: Path
) -> None:
    whole = document if is_trace else report_of(document)
    path = tmp_path / "edited.json"
    for place in places(whole):
        if place[-1] is None or (is_trace and len(place) > 4):
            continue
        for value in REPLACEMENTS:
            path.write_text(json.dumps(replaced(whole, place, value)))
            assert is_safe(use(path)), (place, value)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_drawn_edits_of_a_file_give_a_report_or_a_named_error(
    document: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = data.draw(st.sampled_from([document, report_of(document)]))
    path = tmp_path_factory.getbasetemp() / "drawn.json"
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from([p for p in places(whole) if p[-1] is not None]))
        whole = replaced(whole, place, data.draw(values))
        if not isinstance(whole, dict) or not whole:
            break
    path.write_text(json.dumps(whole))
    assert is_safe(use(path))


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff", b"\x00", b"[" * 100_000, b'{"a":' * 5_000 + b"1" + b"}" * 5_000, b"1", b"[]",
        b'{"traceEvents": 5}', b'{"traceEvents": [], "otherData": {"graphrt_reports": 5}}',
        b'{"traceEvents": [], "otherData": {"graphrt_reports": [5]}}', b"9" * 5_000,
        b'{"graphrt_report": {"graphrt_report": 2}}', b'{"graphrt_report": 2}',
        b'{"graphrt_report": "\\u001b[2J"}',
    ],
    ids=lambda content: repr(content[:40]),
)  # fmt: skip
def test_the_report_command_names_what_is_wrong_with_a_file(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from graphrt.cli.app import main

    path = tmp_path / "bad.json"
    path.write_bytes(content)
    for more in ([], ["--html", str(tmp_path / "page.html")]):
        monkeypatch.setattr("sys.argv", ["graphrt", "report", str(path), *more])
        with pytest.raises(SystemExit) as stopped:
            main()
        said = capsys.readouterr().err
        assert stopped.value.code == 2 and "InvalidOptionError: the report cannot be read" in said
        assert "Traceback" not in said and "\x1b[2J" not in said
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("source", [None, 5, b"run.json", "a\0b", "/dev/zero", {}, {"a": 1}])
def test_a_source_that_is_no_report_is_refused(source: Any) -> None:
    with pytest.raises(InvalidOptionError, match="the report cannot be read"):
        page(source)


def test_control_characters_of_a_file_and_its_name_are_printed_escaped(
    document: dict[str, Any], tmp_path: Path
) -> None:
    report = report_of(document)
    for graph in report["graphs"]:
        graph["graph"] = graph["failure"] = CLEAR
    report["device"] = f"cpu\nSteps: 0{CLEAR}"
    path = tmp_path / f"run{CLEAR}\n.json"
    path.write_text(json.dumps(report))
    text = CliRunner().invoke(app, ["report", str(path)]).stdout
    assert is_safe(text) and "\\x1b[2J" in text and "\\u202e" in text
    # A name in one line cannot begin another line.
    assert "cpu\\nSteps: 0" in text and text.startswith("run\\x1b[2J")
    assert is_safe(json.dumps(load_report(path), ensure_ascii=False))


@given(st.text(st.characters()))
def test_printable_text_is_left_and_every_other_character_is_escaped(text: str) -> None:
    shown = printable(text)
    assert is_safe(shown) and printable(shown) == shown and shown.isascii() >= text.isascii()
    assert shown == text or not text.replace("\n", "").replace("\t", "").isprintable()
    assert printable(text, kept="").isprintable()


# Links -------------------------------------------------------------------------------------------


def writers(runner: Any) -> dict[str, Any]:
    def traced(path: Path) -> None:
        with trace(path, runner):
            pass

    report = runner.report()
    return {
        "plan": runner.plan.save,
        "report": report.save,
        "trace": traced,
        "page": lambda path: write_page(path, report),
    }


@pytest.mark.parametrize("what", ["plan", "report", "trace", "page"])
def test_a_file_is_never_written_through_a_planted_link(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = writers(planted_runner())[what]
    victim, target = tmp_path / "victim", tmp_path / "out" / "file.json"
    target.parent.mkdir()
    victim.write_text("precious")
    victim.chmod(0o600)
    for planted in (victim, tmp_path / "new"):
        target.symlink_to(planted)
        with pytest.raises(GraphRTError, match=f"the {what} cannot be written") as caught:
            write(target)
        assert "a link" in str(caught.value.got)
        target.unlink()
    # A link under the name of the new file, however it was guessed.
    monkeypatch.setattr("secrets.token_hex", lambda _: "0")
    for name in (".graphrt-0", f".{target.name}.{os.getpid()}"):
        (target.parent / name).symlink_to(victim)
    with pytest.raises(GraphRTError, match="cannot be written"):
        write(target)
    assert victim.read_text() == "precious" and not (tmp_path / "new").exists()
    monkeypatch.undo()
    write(target)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("what", ["plan", "report", "trace", "page"])
def test_writing_again_replaces_the_file_whole_and_keeps_its_mode(
    what: str, tmp_path: Path
) -> None:
    write, target = writers(planted_runner())[what], tmp_path / "file.json"
    write(target)
    (tmp_path / "other").touch()
    assert target.stat().st_mode == (tmp_path / "other").stat().st_mode
    (tmp_path / "other").unlink()
    target.write_text("x" * 1_000_000)
    target.chmod(0o600)
    write(target)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600 and target.stat().st_size < 1_000_000
    assert [each.name for each in tmp_path.iterdir()] == ["file.json"]


@pytest.mark.parametrize("path", ["/dev/null", ".", "", None, 5, "a\0b", "missing/run.json"])
def test_a_path_that_no_file_can_have_is_refused(path: Any) -> None:
    for write in writers(planted_runner()).values():
        with pytest.raises((GraphRTError, TypeError)):
            write(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_has_no_rights_of_another_users_file_that_it_replaces(tmp_path: Path) -> None:
    """Else a report of ours would run as us, or be anybody's to write."""
    target = tmp_path / "report.json"
    target.write_text("theirs")
    os.chown(target, 12345, -1)
    target.chmod(0o4777)
    planted_runner().report().save(target)
    status = target.stat()
    assert status.st_uid == os.geteuid()
    assert not status.st_mode & (stat.S_ISUID | stat.S_IWGRP | stat.S_IWOTH)
