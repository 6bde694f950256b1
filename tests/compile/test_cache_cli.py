"""`graphrt cache`: what it lists, shows and removes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from graphrt.cli.app import app
from graphrt.cli.cache import age_text
from graphrt.compile.cache.entry import CacheEntry, default_directory
from graphrt.compile.cache.key.parts import CacheKey
from graphrt.compile.cache.listing import explain_miss
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.texts import size_text
from tests.compile.cache_keys import cache_key, saving

SETTINGS = {"backend": "inductor", "splitting_ops": ["demo::attention"]}


def key_of(source: bytes) -> CacheKey:
    versions = {"torch": "2.13.0", "device": "cpu"}
    return cache_key(SETTINGS, {"net.model": source}, versions=versions, compiler={"a": 1})


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRAPHRT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    for rank in range(2):
        entry = CacheEntry(key_of(b"one"), rank=rank)
        entry.store("piece_0", saving(content=b"x" * 3000))
        entry.store("piece_1", saving("a", "b"))
    CacheEntry(key_of(b"two")).write_text("computation_graph.py", "")
    (tmp_path / "not-ours").mkdir()
    return tmp_path


def run(*arguments: str, stdin: str | None = None, code: int = 0) -> str:
    command = ["cache", *arguments]
    result = CliRunner().invoke(app, command, input=stdin, catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def name_of(source: bytes) -> str:
    return key_of(source).digest[:16]


def test_ls_lists_each_key_with_backend_version_and_size(directory: Path):
    text = run("ls")
    (line,) = [each for each in text.splitlines() if name_of(b"one") in each]
    for part in ("inductor", "2.13.0", "cpu", "0 1", "KiB"):
        assert part in line
    assert "not-ours" not in text
    assert f"2 keys, {text.rpartition('keys, ')[2]}" in text and str(directory) in text


def test_ls_as_json_has_pieces_ranks_and_ages(directory: Path):
    data = {each["key"]: each for each in json.loads(run("ls", "--json"))}
    one = data[name_of(b"one")]
    assert (one["pieces"], one["ranks"]) == (2, ["0", "1"])
    assert one["backend"] == "inductor" and one["versions"]["torch"] == "2.13.0"
    assert 0 <= one["age_s"] < 60 and one["size_bytes"] > 6000
    assert data[name_of(b"two")]["pieces"] == 0


def test_ls_of_a_missing_or_empty_directory_lists_zero_keys(tmp_path: Path):
    assert "0 keys" in run("ls", "--directory", str(tmp_path / "missing"))
    assert json.loads(run("ls", "--json", "--directory", str(tmp_path))) == []


def test_show_prints_sources_settings_and_pieces_of_a_key(directory: Path):
    text = run("show", name_of(b"one")[:6])
    for part in ("net.model", '["demo::attention"]', "piece_0", "Rank 1"):
        assert part in text
    assert "1 settings of the compiler" in text
    data = json.loads(run("show", name_of(b"one"), "--json"))
    assert data["groups"] == key_of(b"one").groups
    assert sorted(data["ranks"][0]["pieces"]) == ["piece_0", "piece_1"]


def test_show_reports_a_piece_with_a_wrong_checksum_and_exits_with_1(directory: Path):
    path = directory / name_of(b"one") / "rank_0" / "piece_0.piece"
    path.write_bytes(path.read_bytes()[:-1] + b"y")
    data = json.loads(run("show", name_of(b"one"), "--json", code=1))
    assert list(data["ranks"][0]["damaged"]) == ["piece_0"]
    assert data["ranks"][1]["damaged"] == {}
    assert "checksum" in run("show", name_of(b"one"), code=1)


def test_a_key_whose_file_cannot_be_read_is_still_listed(directory: Path):
    (directory / name_of(b"one") / "key.json").write_text("{}")
    assert name_of(b"one") in run("ls")
    assert "cannot be read" in run("show", name_of(b"one"))


@pytest.mark.parametrize("prefix", ["", "xyz"])
def test_show_of_an_unknown_key_is_an_error(directory: Path, prefix: str):
    with pytest.raises(InvalidOptionError, match="no such key"):
        run("show", prefix)


def test_rm_asks_for_confirmation_before_removing_a_key(directory: Path):
    run("rm", name_of(b"one"), stdin="n\n", code=1)
    assert (directory / name_of(b"one")).exists()
    assert "1 removed" in run("rm", name_of(b"one"), stdin="y\n")
    assert not (directory / name_of(b"one")).exists()
    assert (directory / name_of(b"two")).exists()


def test_rm_all_leaves_directories_that_are_no_cache_keys(directory: Path):
    (directory / ".tmp-0123456789ab" / "rank_0").mkdir(parents=True)  # of a removal that was killed
    assert "2 removed" in run("rm", "--all", "--yes")
    assert [each.name for each in directory.iterdir()] == ["not-ours"]
    assert "0 removed" in run("rm", "--all", "--yes")


def test_rm_leaves_temporary_files_and_folders_of_other_programs(directory: Path, tmp_path: Path):
    others = [".tmp-work", ".tmp-0123456789ab", "0123456789abcdef", "fedcba9876543210"]
    for name in others[:3]:
        (directory / name).mkdir()
        (directory / name / "thesis.txt").write_text("mine")
    (directory / others[3]).symlink_to(directory / name_of(b"one"))
    (directory / ".tmp-notes").write_text("mine")
    assert "2 removed" in run("rm", "--all", "--yes")
    left = {each.name for each in directory.iterdir()}
    assert left == {*others, ".tmp-notes", "not-ours"}
    assert all((directory / name / "thesis.txt").exists() for name in others[:3])
    with pytest.raises(InvalidOptionError, match="no such key"):
        run("rm", others[2])


@pytest.mark.parametrize("arguments", [[], ["abc", "--all"]])
def test_rm_without_a_key_or_with_both_key_and_all_is_an_error(
    directory: Path, arguments: list[str]
):
    with pytest.raises(InvalidOptionError, match="which keys"):
        run("rm", *arguments)


def test_sizes_and_ages_are_printed_in_readable_units():
    assert [size_text(each) for each in (0, 1023, 12345, 5 << 20, 3 << 30)] == [
        "0 B",
        "1023 B",
        "12.1 KiB",
        "5.0 MiB",
        "3.0 GiB",
    ]
    assert [age_text(each) for each in (0.2, 59, 61, 7300, 200000)] == [
        "0 s",
        "59 s",
        "1 min",
        "2 h",
        "2 d",
    ]


def test_names_of_files_reach_a_terminal_without_control_characters(directory: Path):
    """Whoever may write the folder would rename the window of whoever lists it."""
    rank = directory / name_of(b"one") / "rank_0"
    (rank / "piece_0.piece").rename(rank / "piece\x1b]0;owned\x07.piece")
    rank.rename(rank.with_name("rank_\x1b]0;owned\x07"))
    for arguments, code in ((["ls"], 0), (["show", name_of(b"one")], 1)):
        text = run(*arguments, code=code)
        assert "\x1b" not in text
        assert "\x07" not in text


@pytest.mark.parametrize("target", ["nowhere", "piece_9.piece"], ids=["dangling", "loop"])
def test_a_link_that_leads_nowhere_is_listed_as_a_damaged_piece(directory: Path, target: str):
    (directory / name_of(b"one") / "rank_0" / "piece_9.piece").symlink_to(target)
    assert name_of(b"one") in run("ls")
    (rank, _) = json.loads(run("show", name_of(b"one"), "--json", code=1))["ranks"]
    assert list(rank["damaged"]) == ["piece_9"] and rank["pieces"]["piece_9"] == 0
    assert "piece_9" in run("show", name_of(b"one"), code=1)
    assert "1 removed" in run("rm", name_of(b"one"), "--yes")


WRONG_KINDS = {
    "a number of a version": {"versions": {"torch": 7}},
    "a list of a version": {"versions": {"device": ["cpu"]}},
    "None of a version": {"versions": {"torch": None}},
    "a list of a backend": {"settings": {"backend": ["inductor"]}},
    "a dict of a backend": {"settings": {"backend": {"a": 1}}},
    "a number of a function": {"called": {"net.model": 7}},
    "a list of a function": {"called": {"net.model": [{"a": 1}]}},
    "a lone surrogate": {"versions": {"torch": "\ud800"}},
    "a lone surrogate of a setting": {"settings": {"backend": "eager", "a": ["\udfff"]}},
    "a lone surrogate of a name": {"called": {"net\ud800": ["0" * 64]}},
    "a lone surrogate of a compiler's": {"compiler": {"\ud800": 1}},
}


@pytest.mark.parametrize("groups", WRONG_KINDS.values(), ids=WRONG_KINDS.keys())
def test_a_key_file_with_values_of_wrong_kinds_is_listed_as_damaged(
    directory: Path, groups: dict[str, dict[str, object]]
):
    key = CacheKey.from_groups(groups)
    (directory / key.digest[:16] / "rank_0").mkdir(parents=True)
    (directory / key.digest[:16] / "key.json").write_text(key.to_json())
    for arguments in (["ls"], ["show", key.digest[:16]]):
        for option in ([], ["--json"]):
            run(*arguments, *option).encode()
    assert "cannot be read" in run("show", key.digest[:16])
    assert explain_miss(directory, key_of(b"three"))


def test_a_piece_whose_name_is_no_text_is_shown_as_damaged(directory: Path):
    folder = next(directory.glob("*/rank_0"))
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\x1b[31m.piece")).write_bytes(b"none of graphrt")
    for option in ([], ["--json"]):
        text = run("show", folder.parent.name, *option, code=1)
        assert "\x1b" not in text and "no piece of this version" in text


@pytest.mark.parametrize("folder", ["~no_such_user/x", "x" * 5000])
def test_a_folder_that_no_folder_can_be_is_named(monkeypatch: pytest.MonkeyPatch, folder: str):
    monkeypatch.setenv("GRAPHRT_CACHE_DIR", folder)
    with pytest.raises(InvalidOptionError, match="folder of the compile cache"):
        default_directory()


def test_why_names_what_differs_from_the_nearest_key(directory: Path):
    CacheEntry(key_of(b"three")).store("piece_0", saving())
    told = run("why", name_of(b"one"))
    assert f"{name_of(b'one')}: {name_of(b'three')} is nearest" in told
    assert "called.net.model: edited" in told


def test_why_shows_how_the_last_piece_differs_from_the_nearest_one(directory: Path):
    rank = directory / name_of(b"one") / "rank_0"
    for number, factor in enumerate(("2.0", "3.0")):
        (rank / f"piece_{number}.txt").write_text(f"%0 = input\n%1 = mul (%0, float {factor})\n")
        os.utime(rank / f"piece_{number}.piece", (number, number))
    told = run("why", name_of(b"one"))
    assert "piece_1 is the last piece that was written, piece_0 the nearest to it" in told
    assert "-%1 = mul (%0, float 2.0)" in told and "+%1 = mul (%0, float 3.0)" in told
    assert "input" not in told


def test_why_compares_a_whole_graph_with_whole_graphs(directory: Path):
    """A start with both writes the whole graph last; its own pieces are no edit of it."""
    entry = CacheEntry(key_of(b"four"))
    new, old = "%0 = input\n", "%0 = input\n%1 = mul (%0, float 3.0)\n"
    rank = directory / name_of(b"four") / "rank_0"
    texts = {"whole_old": old, "piece_new": new, "whole_new": new}
    for number, (name, text) in enumerate(texts.items()):
        entry.store(name, saving())
        (rank / f"{name}.txt").write_text(text)
        os.utime(rank / f"{name}.piece", (number, number))
    told = run("why", name_of(b"four"))
    assert "whole_new is the last piece that was written, whole_old the nearest to it" in told


def test_why_of_an_empty_cache_says_so(tmp_path: Path):
    told = run("why", "--directory", str(tmp_path))
    assert f"{tmp_path} holds no key" in told and 'backend="eager"' in told


def test_why_without_a_key_is_about_the_latest(directory: Path):
    os.utime(directory / name_of(b"two"))
    assert run("why").startswith((name_of(b"one"), name_of(b"two")))
    with pytest.raises(InvalidOptionError, match="no such key"):
        run("why", "xyz")


def start_of(sources: dict[bytes, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process does that needs these pieces: load or else compile each."""
    monkeypatch.setattr("graphrt.compile.cache.entry._has_missed", False, raising=False)
    for source, pieces in sources.items():
        entry = CacheEntry(key_of(source))
        for piece in pieces:
            if entry.load(piece) is None:
                entry.store(piece, saving())
        entry.write_text("computation_graph.py", f"a text of {pieces}")


def test_why_after_a_start_that_loaded_all_says_so(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    start_of({b"three": ["piece_0"]}, monkeypatch)
    assert "is nearest" in run("why")
    start_of({b"one": ["piece_0", "piece_1"]}, monkeypatch)
    # Of another rank the last start is the one that wrote.
    assert "is nearest" in run("why")
    one = directory / name_of(b"one")
    os.rename(one / "rank_1", directory / "not-ours" / "rank_1")
    told = run("why").strip()
    assert told == f"{one.name}: the last start loaded all from the cache, nothing differed"
    assert "is nearest" in run("why", one.name)


def test_why_after_a_start_that_missed_a_piece_names_what_differed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    start_of({b"three": ["piece_0"]}, monkeypatch)
    start_of({b"three": ["piece_0"]}, monkeypatch)
    assert "loaded all" in run("why")
    for sources in (
        {b"three": ["piece_0", "piece_1"]},  # one is loaded, then one is compiled
        {b"four": ["piece_0"], b"three": ["piece_0"]},  # a key is new, then one is loaded
    ):
        start_of(sources, monkeypatch)
        assert run("why").startswith(f"{name_of(next(iter(sources)))}: ")
        assert "loaded all" not in run("why")


def test_a_start_without_the_right_to_write_loads_and_says_so(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "touch", refuse)
    monkeypatch.setattr("graphrt.compile.cache.entry._has_missed", False, raising=False)
    with caplog.at_level("DEBUG", logger="graphrt"):
        assert CacheEntry(key_of(b"one")).load("piece_0") is not None
    assert "will not tell of this start: read-only" in caplog.text
