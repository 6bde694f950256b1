"""The compile cache as a caller meets it: hits and misses, settings, formats, permissions."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import warnings
from pathlib import Path

import pytest

from graphrt.compile.cache.disk import CompileCache, default_directory
from graphrt.compile.cache.key.parts import CacheKey
from graphrt.compile.cache.store import CompileCacheWarning
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.log import logger, set_up_logging
from tests.compile.cache_keys import bytes_of, cache_key

VERSIONS = {"torch": "2.13.0", "graphrt": "0.1.0"}


def key_of(source: bytes = b"def f(): ...", **settings: object) -> CacheKey:
    return cache_key(settings, {"model": source}, versions=VERSIONS, compiler={})


@pytest.fixture
def cache(tmp_path: Path) -> CompileCache:
    return CompileCache(tmp_path / "cache")


def fill(cache: CompileCache, key: CacheKey, **artifacts: bytes) -> None:
    with cache.open(key) as entry:
        for name, content in (artifacts or {"piece_0": b"code"}).items():
            entry.store(name, content)


def test_what_was_stored_is_loaded_by_the_next_process(cache: CompileCache):
    entry = cache.open(key_of())
    assert not entry.found and entry.load("piece_0") is None
    entry.store("piece_0", b"code")
    assert cache.open(key_of()).load("piece_0") is None, "it is not complete yet"
    assert entry.complete()
    later = CompileCache(cache.directory).open(key_of())
    assert later.found and later.names == ("piece_0",)
    artifact = later.load("piece_0")
    assert artifact is not None and artifact.content == b"code"
    assert bytes_of(later, "piece_0") == b"code"
    assert later.load("piece_1") is None


def test_the_writer_itself_can_load_what_it_completed(cache: CompileCache):
    entry = cache.open(key_of())
    entry.store("piece_0", b"code")
    entry.complete()
    assert bytes_of(entry, "piece_0") == b"code"


def test_figures(cache: CompileCache):
    fill(cache, key_of(), piece_0=b"a", piece_1=b"b")
    entry = cache.open(key_of())
    for name in ("piece_0", "piece_1", "piece_2"):
        entry.load(name)
    figures = cache.figures
    assert (figures.hits, figures.misses, figures.stores, figures.damaged) == (2, 1, 2, 0)


def test_another_key_misses(cache: CompileCache):
    fill(cache, key_of(backend="inductor"))
    assert cache.open(key_of(backend="inductor")).found
    assert not cache.open(key_of(backend="eager")).found
    assert not cache.open(key_of(b"edited", backend="inductor")).found


def test_a_miss_is_explained_by_the_nearest_entry(cache: CompileCache):
    assert "nothing yet" in cache.open(key_of()).explain_miss()
    fill(cache, key_of(b"1", backend="inductor", fast=True, level=3))
    fill(cache, key_of(b"2", backend="inductor", fast=True))
    told = cache.open(key_of(b"3", backend="inductor", fast=False)).explain_miss()
    assert "settings.fast: True -> False" in told and "sources.model: edited" in told
    assert key_of(b"2", backend="inductor", fast=True).digest[:16] in told
    other_rank = CompileCache(cache.directory, rank=1).open(
        key_of(b"2", backend="inductor", fast=True)
    )
    assert "no such rank" in other_rank.explain_miss()


def test_ranks_are_apart(cache: CompileCache):
    fill(cache, key_of(), piece_0=b"rank 0")
    other = CompileCache(cache.directory, rank="1_0")
    assert other.open(key_of()).load("piece_0") is None
    fill(other, key_of(), piece_0=b"rank 1")
    assert bytes_of(cache.open(key_of()), "piece_0") == b"rank 0"
    assert bytes_of(other.open(key_of()), "piece_0") == b"rank 1"


@pytest.mark.parametrize("rank", ["../0", "a/b", ""])
def test_a_rank_is_one_directory(tmp_path: Path, rank: str):
    with pytest.raises(InvalidOptionError):
        CompileCache(tmp_path, rank=rank)


@pytest.mark.parametrize("name", ["../piece", "a/b", ".hidden", "", "manifest.json"])
def test_a_name_is_one_file(cache: CompileCache, name: str):
    with pytest.raises(InvalidOptionError):
        cache.open(key_of()).store(name, b"")


def test_an_artifact_writes_itself_to_a_file_or_a_directory(cache: CompileCache, tmp_path: Path):
    def unpacked(path: Path) -> None:
        (path / "fxgraph" / "ab").mkdir(parents=True)
        (path / "fxgraph" / "ab" / "graph").write_bytes(b"graph")
        (path / "code.py").write_text("x = 1")

    with cache.open(key_of()) as entry:
        entry.store("binary", lambda path: path.write_bytes(b"file"))
        entry.store("unpacked", unpacked)
    later = cache.open(key_of())
    file, directory = later.load("binary"), later.load("unpacked")
    assert file is not None and file.content == b"file"
    assert directory is not None
    assert directory.content == {"code.py": b"x = 1", "fxgraph/ab/graph": b"graph"}
    written = directory.write(tmp_path / "written")
    assert (written / "fxgraph/ab/graph").read_bytes() == b"graph"
    assert file.write(tmp_path / "file").read_bytes() == b"file"


def test_what_a_payload_raises_is_raised_and_leaves_nothing(cache: CompileCache):
    def cannot(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("this artifact cannot be saved")

    entry = cache.open(key_of())
    entry.store("piece_0", b"code")
    with pytest.raises(RuntimeError, match="cannot be saved"):
        entry.store("piece_1", cannot)
    entry.complete()
    assert cache.open(key_of()).names == ("piece_0",)
    assert not list(cache.directory.rglob("piece_1"))


def test_an_error_in_the_block_discards(cache: CompileCache):
    def compile_half() -> None:
        with cache.open(key_of()) as entry:
            entry.store("piece_0", b"code")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compile_half()
    assert not cache.open(key_of()).found
    assert not list(cache.directory.rglob("run-*"))


def test_an_entry_can_be_added_to(cache: CompileCache):
    fill(cache, key_of(), piece_0=b"a")
    before = cache.open(key_of()).load("piece_0")
    fill(cache, key_of(), piece_0_size_8=b"b")
    later = cache.open(key_of())
    assert set(later.names) == {"piece_0", "piece_0_size_8"}
    assert later.load("piece_0") == before, "what was there stays where it was"


def test_what_is_there_and_good_is_not_replaced(cache: CompileCache):
    fill(cache, key_of(), piece_0=b"first")
    entry = cache.open(key_of())
    entry.store("piece_0", b"second")
    assert not entry.complete()
    assert bytes_of(cache.open(key_of()), "piece_0") == b"first"


def test_the_first_to_complete_wins_and_the_other_leaves_nothing(cache: CompileCache):
    first, second = cache.open(key_of()), cache.open(key_of())
    first.store("piece_0", b"first")
    second.store("piece_0", b"second")
    assert first.complete() and not second.complete()
    assert bytes_of(second, "piece_0") == b"first"
    assert bytes_of(cache.open(key_of()), "piece_0") == b"first"
    assert len(list(cache.directory.rglob("run-*"))) == 1


def test_what_loaded_but_does_not_run_is_replaced(cache: CompileCache):
    fill(cache, key_of(), piece_0=b"of another torch", piece_1=b"good")
    entry = cache.open(key_of())
    entry.load("piece_0")
    with pytest.warns(CompileCacheWarning, match="piece_0 of .*: bad header"):
        entry.reject("piece_0", AssertionError("bad header"))
    assert (cache.figures.hits, cache.figures.damaged) == (0, 1)
    entry.store("piece_0", b"new")
    assert entry.complete()
    later = cache.open(key_of())
    assert (bytes_of(later, "piece_0"), bytes_of(later, "piece_1")) == (b"new", b"good")


def test_texts_are_for_reading(cache: CompileCache):
    entry = cache.open(key_of())
    entry.write_text("computation_graph.py", "graph = 1\n")
    assert (entry.directory / "computation_graph.py").read_text() == "graph = 1\n"
    entry.store("piece_0", b"code")
    entry.complete()
    later = cache.open(key_of())
    (entry.directory / "computation_graph.py").write_text("# my notes")
    assert later.load("piece_0") is not None, "an edit by hand is no damage"
    later.write_text("computation_graph.py", "graph = 2\n")
    later.complete()
    assert (entry.directory / "computation_graph.py").read_text() == "graph = 2\n"
    assert later.found and len(list(cache.directory.rglob("run-*"))) == 1


def test_a_copied_directory_hits(cache: CompileCache, tmp_path: Path):
    fill(cache, key_of(), piece_0=b"code")
    shutil.copytree(cache.directory, tmp_path / "elsewhere" / "copy")
    shutil.rmtree(cache.directory)
    assert bytes_of(CompileCache(tmp_path / "elsewhere/copy").open(key_of()), "piece_0") == b"code"


def test_nothing_on_disk_names_the_directory(cache: CompileCache):
    fill(cache, key_of(), piece_0=b"code")
    for path in cache.directory.rglob("*"):
        assert path.is_dir() or str(cache.directory).encode() not in path.read_bytes()


# Settings --------------------------------------------------------------------------------------


def test_the_directory_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GRAPHRT_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "graphrt" / "compile"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_directory() == tmp_path / "home" / ".cache" / "graphrt" / "compile"
    monkeypatch.setenv("GRAPHRT_CACHE_DIR", "~/mine")
    assert CompileCache().directory == tmp_path / "home" / "mine"
    assert CompileCache(tmp_path / "given").directory == tmp_path / "given"


def test_the_cache_can_be_switched_off(cache: CompileCache, monkeypatch: pytest.MonkeyPatch):
    fill(cache, key_of())
    monkeypatch.setenv("GRAPHRT_DISABLE_COMPILE_CACHE", "1")
    off = CompileCache(cache.directory)
    entry = off.open(key_of())
    assert not entry.found and entry.load("piece_0") is None
    entry.store("piece_1", lambda path: pytest.fail("nothing is to be saved"))
    entry.write_text("computation_graph.py", "")
    assert not entry.complete()
    assert not list(cache.directory.rglob("computation_graph.py"))
    assert CompileCache(cache.directory, enabled=True).open(key_of()).found
    monkeypatch.setenv("GRAPHRT_DISABLE_COMPILE_CACHE", "0")
    assert CompileCache(cache.directory).open(key_of()).found
    monkeypatch.setenv("GRAPHRT_DISABLE_COMPILE_CACHE", "maybe")
    with pytest.raises(InvalidOptionError, match="GRAPHRT_DISABLE_COMPILE_CACHE"):
        CompileCache(cache.directory)


def test_the_save_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GRAPHRT_COMPILE_CACHE_SAVE_FORMAT", raising=False)
    assert CompileCache(tmp_path).open(key_of()).save_format == "binary"
    monkeypatch.setenv("GRAPHRT_COMPILE_CACHE_SAVE_FORMAT", "unpacked")
    assert CompileCache(tmp_path).open(key_of()).save_format == "unpacked"
    assert CompileCache(tmp_path, save_format="binary").save_format == "binary"
    with pytest.raises(InvalidOptionError, match="save format"):
        CompileCache(tmp_path, save_format="zip")


# Permissions and disks -------------------------------------------------------------------------


def test_only_the_user_may_enter(cache: CompileCache):
    fill(cache, key_of())
    for path in (cache.directory, *cache.directory.rglob("*")):
        if path.is_dir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o700, path


def test_a_private_directory_is_not_told(cache: CompileCache):
    fill(cache, key_of())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.open(key_of()).load("piece_0")


def test_a_directory_that_cannot_be_written_is_a_warning(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    cache = CompileCache(tmp_path / "file" / "cache")
    entry = cache.open(key_of())
    with pytest.warns(CompileCacheWarning, match="cannot be written"):
        entry.store("piece_0", b"code")
    entry.store("piece_1", lambda path: pytest.fail("given up already"))
    assert not entry.complete() and not entry.found and cache.figures.stores == 0


def test_a_full_disk_leaves_nothing(cache: CompileCache):
    def full(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    entry = cache.open(key_of())
    entry.store("piece_0", b"code")
    with pytest.warns(CompileCacheWarning, match="No space left"):
        entry.store("piece_1", full)
    assert not entry.complete()
    assert not list(cache.directory.rglob("piece_*"))


def test_a_directory_removed_meanwhile_is_a_warning(cache: CompileCache):
    entry = cache.open(key_of())
    entry.store("piece_0", b"code")
    shutil.rmtree(cache.directory)
    with pytest.warns(CompileCacheWarning, match="cannot be written"):
        assert not entry.complete()
    fill(cache, key_of())
    assert cache.open(key_of()).found


def test_old_leftovers_are_swept_and_young_ones_are_not(cache: CompileCache):
    entry = cache.open(key_of())
    entry.store("piece_0", b"killed long ago")
    old = next(cache.directory.rglob("run-*"))
    other = cache.open(key_of())
    other.store("piece_0", b"still compiling")
    os.utime(old, (0, 0))
    fill(cache, key_of(), piece_0=b"code")
    assert not old.exists()
    other.store("piece_1", b"more")
    assert other.complete()
    assert bytes_of(cache.open(key_of()), "piece_0") == b"code"
    os.utime(next(cache.directory.rglob("piece_0")).parent, (0, 0))
    fill(cache, key_of(), piece_2=b"last")
    assert bytes_of(cache.open(key_of()), "piece_0") == b"code", "it belongs to the entry"


# Log -------------------------------------------------------------------------------------------


@pytest.fixture
def own_logger():
    saved = logger.handlers[:], logger.level, logger.propagate
    yield logger
    logger.handlers[:], logger.level, logger.propagate = saved


def test_debug_shows_stores_and_loads(
    cache: CompileCache, own_logger: logging.Logger, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.DEBUG, logger="graphrt"):
        fill(cache, key_of())
        cache.open(key_of()).load("piece_0")
    told = "\n".join(record.message for record in caplog.records)
    assert "no entry" in told and "holds nothing yet" in told
    assert "stored piece_0 (4 B) in" in told and "loaded piece_0 (4 B) from" in told


def test_the_log_is_set_up_only_if_asked_for(own_logger: logging.Logger):
    before = own_logger.handlers[:]
    set_up_logging({})
    assert own_logger.handlers == before
    set_up_logging({"GRAPHRT_LOG": "debug"})
    set_up_logging({"GRAPHRT_LOG": "debug"})
    assert own_logger.level == logging.DEBUG and len(own_logger.handlers) == len(before) + 1
    with pytest.warns(UserWarning, match="GRAPHRT_LOG='LOUD' .* DEBUG, INFO"):
        set_up_logging({"GRAPHRT_LOG": "loud"})
    assert own_logger.level == logging.DEBUG
