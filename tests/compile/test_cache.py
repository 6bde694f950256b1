"""The compile cache as a caller meets it: hits and misses, settings, formats, permissions."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import warnings
from pathlib import Path
from typing import Any

import pytest

from graphrt.compile.cache.entry import CacheEntry, default_directory
from graphrt.compile.cache.key.parts import CacheKey
from graphrt.compile.cache.listing import explain_miss
from graphrt.compile.cache.store import CompileCacheWarning, unpack
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.log import logger, set_up_logging
from tests.compile.cache_keys import cache_key, files_of, saving

VERSIONS = {"torch": "2.13.0", "graphrt": "0.1.0"}


def key_of(source: bytes = b"def f(): ...", **settings: object) -> CacheKey:
    return cache_key(settings, {"model": source}, versions=VERSIONS, compiler={})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def fill(root: Path, key: CacheKey, *names: str, content: bytes = b"code", **keywords: Any) -> None:
    entry = CacheEntry(key, root, **keywords)
    for name in names or ("piece_0",):
        entry.store(name, saving(content=content))


def test_a_stored_piece_is_loaded_by_a_later_entry_of_the_same_key(root: Path):
    entry = CacheEntry(key_of(), root)
    assert not entry.had_pieces and entry.load("piece_0") is None
    entry.store("piece_0", saving("fxgraph/ab/graph", "code.py"))
    for later in (entry, CacheEntry(key_of(), root)):
        assert files_of(later, "piece_0") == {"code.py": b"code", "fxgraph/ab/graph": b"code"}
        assert later.load("piece_1") is None
    assert later.had_pieces


def test_an_unpacked_piece_has_the_files_that_were_saved(root: Path, tmp_path: Path):
    fill(root, key_of())
    archive = CacheEntry(key_of(), root).load("piece_0")
    assert archive is not None
    unpack(archive, tmp_path / "written")
    assert (tmp_path / "written" / "code").read_bytes() == b"code"


def test_an_entry_of_a_different_key_is_a_miss(root: Path):
    fill(root, key_of(backend="inductor"))
    assert CacheEntry(key_of(backend="inductor"), root).had_pieces
    assert not CacheEntry(key_of(backend="eager"), root).had_pieces
    assert not CacheEntry(key_of(b"edited", backend="inductor"), root).had_pieces


def test_a_miss_is_explained_by_the_nearest_entry(root: Path):
    assert "no other key" in explain_miss(root, key_of())[0]
    fill(root, key_of(b"1", backend="inductor", fast=True, level=3))
    fill(root, near := key_of(b"2", backend="inductor", fast=True))
    nearest, *told = explain_miss(root, key_of(b"3", backend="inductor", fast=False))
    assert nearest == f"{near.digest[:16]} is nearest"
    assert told == ["settings.fast: True -> False", "called.model: edited"]
    assert "no such rank" in explain_miss(root, near)[1]
    assert near.digest[:16] not in explain_miss(root, near, but=near.digest[:16])[0]


def test_each_rank_has_cache_entries_of_its_own(root: Path):
    fill(root, key_of(), content=b"rank 0")
    assert CacheEntry(key_of(), root, rank=1).load("piece_0") is None
    fill(root, key_of(), content=b"rank 1", rank=1)
    assert files_of(CacheEntry(key_of(), root), "piece_0") == {"code": b"rank 0"}
    assert files_of(CacheEntry(key_of(), root, rank=1), "piece_0") == {"code": b"rank 1"}


def test_an_error_while_saving_a_piece_is_raised_and_leaves_no_files(root: Path):
    def cannot(path: Path) -> None:
        (path / "code").write_bytes(b"half")
        raise RuntimeError("this artifact cannot be saved")

    entry = CacheEntry(key_of(), root)
    entry.store("piece_0", saving())
    with pytest.raises(RuntimeError, match="cannot be saved"):
        entry.store("piece_1", cannot)
    assert entry.load("piece_0") is not None and entry.load("piece_1") is None
    assert [each.name for each in entry.directory.iterdir()] == ["piece_0.piece"]


def test_pieces_can_be_added_to_an_existing_entry(root: Path):
    fill(root, key_of())
    fill(root, key_of(), "piece_0_8", content=b"b")
    later = CacheEntry(key_of(), root)
    assert files_of(later, "piece_0") == {"code": b"code"}
    assert files_of(later, "piece_0_8") == {"code": b"b"}


def test_a_rejected_piece_is_replaced_by_the_next_store(root: Path):
    fill(root, key_of(), "piece_0", "piece_1")
    entry = CacheEntry(key_of(), root)
    entry.load("piece_0")
    with pytest.warns(CompileCacheWarning, match="piece_0 of .*: bad header"):
        entry.reject("piece_0", AssertionError("bad header"))
    entry.store("piece_0", saving(content=b"new"))
    later = CacheEntry(key_of(), root)
    assert files_of(later, "piece_0") == {"code": b"new"}
    assert files_of(later, "piece_1") == {"code": b"code"}


def test_an_edited_text_in_the_cache_does_not_damage_the_entry(root: Path):
    entry = CacheEntry(key_of(), root)
    entry.write_text("computation_graph.py", "graph = 1\n")
    text = entry.directory / "computation_graph.py"
    assert text.read_text() == "graph = 1\n"
    entry.store("piece_0", saving())
    text.write_text("# my notes")
    later = CacheEntry(key_of(), root)
    assert later.load("piece_0") is not None, "an edit by hand is no damage"
    later.write_text("computation_graph.py", "graph = 2\n")
    assert text.read_text() == "graph = 2\n"


def test_an_edited_unpacked_piece_does_not_change_what_is_loaded(root: Path):
    fill(root, key_of(), save_format="unpacked")
    fill(root, key_of(), save_format="unpacked", content=b"new")
    entry = CacheEntry(key_of(), root)
    shown = entry.directory / "piece_0" / "code"
    assert shown.read_bytes() == b"new"
    shown.write_bytes(b"# my notes")
    assert files_of(entry, "piece_0") == {"code": b"new"}


def test_a_copied_cache_directory_is_a_hit(root: Path, tmp_path: Path):
    fill(root, key_of())
    shutil.copytree(root, tmp_path / "elsewhere" / "copy")
    shutil.rmtree(root)
    assert CacheEntry(key_of(), tmp_path / "elsewhere/copy").load("piece_0") is not None


def test_no_file_in_the_cache_contains_its_directory_path(root: Path):
    fill(root, key_of())
    for path in root.rglob("*"):
        assert path.is_dir() or str(root).encode() not in path.read_bytes()


# Settings --------------------------------------------------------------------------------------


def test_the_cache_directory_comes_from_the_environment_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("GRAPHRT_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "graphrt" / "compile"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_directory() == tmp_path / "home" / ".cache" / "graphrt" / "compile"
    monkeypatch.setenv("GRAPHRT_CACHE_DIR", "~/mine")
    mine = tmp_path / "home" / "mine"
    assert CacheEntry(key_of()).directory.is_relative_to(mine)
    assert CacheEntry(key_of(), tmp_path / "given").directory.is_relative_to(tmp_path / "given")


def test_the_cache_can_be_switched_off(root: Path, monkeypatch: pytest.MonkeyPatch):
    fill(root, key_of())
    monkeypatch.setenv("GRAPHRT_DISABLE_COMPILE_CACHE", "1")
    for entry in (CacheEntry(key_of(), root), CacheEntry(key_of(), root, enabled=False)):
        assert not entry.had_pieces and entry.load("piece_0") is None
        entry.store("piece_1", lambda path: pytest.fail("nothing is to be saved"))
        entry.write_text("computation_graph.py", "")
        assert not list(root.rglob("computation_graph.py"))
        monkeypatch.setenv("GRAPHRT_DISABLE_COMPILE_CACHE", "0")
    assert CacheEntry(key_of(), root).had_pieces
    monkeypatch.setenv("GRAPHRT_DISABLE_COMPILE_CACHE", "maybe")
    with pytest.raises(InvalidOptionError, match="GRAPHRT_DISABLE_COMPILE_CACHE"):
        CacheEntry(key_of(), root)


# Permissions and disks -------------------------------------------------------------------------


def test_cache_directories_are_accessible_to_their_user_only(root: Path):
    fill(root, key_of(), save_format="unpacked")
    for path in (root, *root.rglob("*")):
        if path.is_dir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o700, path


def test_loading_from_a_private_directory_gives_no_warning(root: Path):
    fill(root, key_of())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert files_of(CacheEntry(key_of(), root), "piece_0") == {"code": b"code"}


def test_a_cache_directory_that_cannot_be_written_gives_a_warning(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    entry = CacheEntry(key_of(), tmp_path / "file" / "cache")
    with pytest.warns(CompileCacheWarning, match="cannot be written"):
        entry.store("piece_0", saving())
    entry.store("piece_1", lambda path: pytest.fail("given up already"))
    assert not entry.had_pieces


def test_a_full_disk_leaves_no_half_piece(root: Path):
    def full(path: Path) -> None:
        (path / "code").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    entry = CacheEntry(key_of(), root)
    entry.store("piece_0", saving())
    with pytest.warns(CompileCacheWarning, match="No space left"):
        entry.store("piece_1", full)
    assert [each.name for each in entry.directory.iterdir()] == ["piece_0.piece"]


def test_a_cache_directory_removed_during_use_gives_a_warning(root: Path):
    entry = CacheEntry(key_of(), root)
    entry.store("piece_0", saving())
    shutil.rmtree(root)
    with pytest.warns(CompileCacheWarning, match="cannot be written"):
        entry.store("piece_1", saving())
    fill(root, key_of())
    assert CacheEntry(key_of(), root).had_pieces


def test_old_temporary_files_are_removed_and_recent_files_kept(root: Path):
    fill(root, key_of())
    rank = CacheEntry(key_of(), root).directory
    old, young = rank / ".tmp-killed", rank / ".tmp-compiling"
    for path in (old, young):
        path.mkdir()
    os.utime(old, (0, 0))
    os.utime(rank / "piece_0.piece", (0, 0))
    fill(root, key_of(), "piece_1")
    assert not old.exists() and young.exists()
    assert CacheEntry(key_of(), root).load("piece_0") is not None


# Log -------------------------------------------------------------------------------------------


@pytest.fixture
def own_logger():
    saved = logger.handlers[:], logger.level, logger.propagate
    yield logger
    logger.handlers[:], logger.level, logger.propagate = saved


def test_the_debug_log_has_stores_and_loads(
    root: Path, own_logger: logging.Logger, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.DEBUG, logger="graphrt"):
        fill(root, key_of())
        CacheEntry(key_of(), root).load("piece_0")
    told = "\n".join(record.message for record in caplog.records)
    assert "no entry" in told and "holds no other key" in told
    assert "stored piece_0 (" in told and "loaded piece_0 (" in told


def test_logging_is_set_up_only_if_the_environment_variable_is_set(
    own_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
):
    before = own_logger.handlers[:]
    monkeypatch.delenv("GRAPHRT_LOG", raising=False)
    set_up_logging()
    assert own_logger.handlers == before
    monkeypatch.setenv("GRAPHRT_LOG", "debug")
    set_up_logging()
    assert own_logger.level == logging.DEBUG and len(own_logger.handlers) == len(before) + 1
    monkeypatch.setenv("GRAPHRT_LOG", "loud")
    with pytest.warns(UserWarning, match="GRAPHRT_LOG='LOUD' .* DEBUG, INFO"):
        set_up_logging()
    assert own_logger.level == logging.DEBUG
