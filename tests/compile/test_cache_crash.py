"""Killed writers, writers that race, bytes that changed: a cache works or misses, never lies."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from graphrt.compile.cache.entry import CacheEntry
from graphrt.compile.cache.key.parts import CacheKey
from graphrt.compile.cache.listing import remove, stored_keys
from graphrt.compile.cache.store import CompileCacheWarning
from tests.compile.cache_keys import cache_key, files_of, saving

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")

PIECES = {"piece_0": b"zero " * 40, "piece_1": b"one " * 40}
NAMES = ("ab/graph", "code.py")
FILES = ("open", "os.", "shutil.")
DONE, KILLED = 0, 77


def key_of(source: bytes = b"model") -> CacheKey:
    return cache_key({}, {"model": source}, versions={"torch": "2.13.0"}, compiler={})


def write(directory: Path) -> None:
    entry = CacheEntry(key_of(), directory)
    entry.write_text("computation_graph.py", "graph")
    for name, content in PIECES.items():
        entry.store(name, saving(*NAMES, content=content))


def write_unpacked(directory: Path) -> None:
    entry = CacheEntry(key_of(), directory, save_format="unpacked")
    for name, content in PIECES.items():
        entry.store(name, saving(*NAMES, content=content))


def remove_all(directory: Path) -> None:
    remove(stored_keys(directory))


def content(entry: CacheEntry) -> dict[str, bytes]:
    """What the entry has of `PIECES`; fails if any of it is not what was written."""
    loaded = {}
    for name, written in PIECES.items():
        files = files_of(entry, name)
        if files is not None:
            assert files == dict.fromkeys(NAMES, written)
            loaded[name] = written
    return loaded


def killed_at(number: int, torn: bool, work: Callable[[Path], None], directory: Path) -> int:
    """Run `work` in a process that dies at its `number`-th call of the file system.

    Files reach the disk at `fsync`; where they are `torn`, one that was written and not synced has
    only half of its bytes there afterwards, also under a name that it was given since.
    """
    child = os.fork()
    if child == 0:
        calls, unsynced = 0, set[str]()

        def count() -> None:
            nonlocal calls
            calls += 1
            if calls != number:
                return
            for name in filter(os.path.isfile, unsynced if torn else ()):
                os.truncate(name, os.path.getsize(name) // 2)
            os._exit(KILLED)

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            # Imports open files too; a tree is removed by names without a directory.
            ours = str(directory) in str(arguments[:1]) or event in ("os.remove", "os.rmdir")
            if event.startswith(FILES) and ours:
                count()
                if event == "open" and int(arguments[2]) & (os.O_WRONLY | os.O_RDWR):
                    unsynced.add(str(arguments[0]))
                if event == "os.rename" and str(arguments[0]) in unsynced:
                    unsynced.remove(str(arguments[0]))
                    unsynced.add(str(arguments[1]))

        def sync(descriptor: int) -> None:
            count()
            unsynced.discard(os.readlink(f"/proc/self/fd/{descriptor}"))

        os.fsync = sync
        sys.addaudithook(watch)
        try:
            work(directory)
        except BaseException:
            os._exit(1)
        os._exit(DONE)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize(
    ("work", "filled", "torn"),
    [
        pytest.param(write, False, False, id="write", marks=pytest.mark.long),
        # One function writes both formats: the last ones notice a sync that is left out.
        pytest.param(write, False, True, id="write torn", marks=pytest.mark.long),
        pytest.param(write_unpacked, False, False, id="write unpacked", marks=pytest.mark.long),
        pytest.param(write_unpacked, False, True, id="write unpacked torn", marks=pytest.mark.long),
        pytest.param(write_unpacked, True, False, id="write again", marks=pytest.mark.long),
        pytest.param(write_unpacked, True, True, id="write again torn"),
        pytest.param(remove_all, True, False, id="remove_all"),
    ],
)
def test_a_writer_killed_at_any_point_leaves_a_usable_cache(
    tmp_path: Path, work: Callable[[Path], None], filled: bool, torn: bool
):
    for number in range(1, 1000):
        directory = tmp_path / f"cache-{number}"
        if filled:
            write(directory)
        code = killed_at(number, torn, work, directory)
        assert code in (DONE, KILLED)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = content(CacheEntry(key_of(), directory))
            assert loaded == PIECES or not filled or work is remove_all
            write(directory)
            assert content(CacheEntry(key_of(), directory)) == PIECES
        shutil.rmtree(directory)
        if code == DONE:
            break
    assert code == DONE and number > 8, "every point was tried"


def race(directory: Path, rounds: int, barrier: object, results: object) -> None:
    mine = f"{os.getpid()} ".encode() * 50
    for number in range(rounds):
        barrier.wait()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            entry = CacheEntry(key_of(b"%d" % number), directory, save_format="unpacked")
            for name in ("piece_0", "piece_1", "piece_2"):
                entry.store(name, saving(*NAMES, content=mine))
            loaded = [files_of(entry, name) for name in ("piece_0", "piece_1", "piece_2")]
        whole = all(each and set(each) == set(NAMES) for each in loaded)
        results.put(whole and not told)


def read(directory: Path, stop: object, results: object) -> None:
    reads = bad = 0
    while not stop.is_set():
        for number in range(0, 25, 3):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                entry = CacheEntry(key_of(b"%d" % number), directory)
                files = files_of(entry, "piece_0") or {}
            reads += bool(files)
            bad += len(told) + (len(set(files.values())) > 1)
    results.put((reads, bad))


def test_racing_writers_and_readers_see_only_whole_pieces(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    writers, rounds = 4, 25
    barrier, results = context.Barrier(writers), context.Queue()
    stop, figures = context.Event(), context.Queue()
    reader = context.Process(target=read, args=(tmp_path, stop, figures))
    processes = [
        context.Process(target=race, args=(tmp_path, rounds, barrier, results))
        for _ in range(writers)
    ]
    for each in (reader, *processes):
        each.start()
    whole = [results.get(timeout=60) for _ in range(writers * rounds)]
    stop.set()
    reads, bad = figures.get(timeout=60)
    for each in (reader, *processes):
        each.join(timeout=60)
        assert each.exitcode == 0
    assert all(whole) and reads > 0 and bad == 0
    assert not list(tmp_path.rglob(".tmp-*")), "nobody left anything"


# Damage ----------------------------------------------------------------------------------------


def file_of(directory: Path) -> Path:
    (path,) = directory.rglob("piece_0.piece")
    return path


def test_a_piece_with_a_flipped_bit_is_a_warning_and_a_miss(tmp_path: Path):
    write(tmp_path)
    path = file_of(tmp_path)
    good = path.read_bytes()
    chosen = random.Random(0)
    header = good.index(b"\n")
    positions = [0, header, len(good) - 2, *(chosen.randrange(header) for _ in range(60))]
    for position in [*positions, *(chosen.randrange(len(good)) for _ in range(60))]:
        bad = bytearray(good)
        bad[position] ^= 1 << chosen.randrange(8)
        path.write_bytes(bad)
        with pytest.warns(CompileCacheWarning, match="compiled again") as told:
            loaded = content(CacheEntry(key_of(), tmp_path))
        assert len(told) == 1 and list(loaded) == ["piece_1"]


@pytest.mark.parametrize("damage", ["empty", "cut", "longer", "gone", "a link", "text"])
def test_a_damaged_piece_is_repaired_by_the_next_store(tmp_path: Path, damage: str):
    write(tmp_path)
    path = file_of(tmp_path)
    good = path.read_bytes()
    path.unlink()
    if damage == "a link":
        path.symlink_to(path.with_name("piece_1.piece"))
    elif damage != "gone":
        contents = {"empty": b"", "cut": good[:-2], "longer": good + b"x", "text": b"{}\n" * 64}
        path.write_bytes(contents[damage])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entry = CacheEntry(key_of(), tmp_path)
        assert entry.load("piece_0") is None
    entry.store("piece_0", saving(*NAMES, content=PIECES["piece_0"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert content(CacheEntry(key_of(), tmp_path)) == PIECES


def test_an_entry_copied_from_another_key_is_rejected(tmp_path: Path):
    write(tmp_path)
    other = cache_key({}, {"model": b"model"}, versions={"torch": "2.14.0"}, compiler={})
    shutil.copytree(tmp_path / key_of().digest[:16], tmp_path / other.digest[:16])
    entry = CacheEntry(other, tmp_path)
    with pytest.warns(CompileCacheWarning, match=f"another key or piece, {key_of().digest}"):
        assert entry.load("piece_0") is None
    entry.store("piece_0", saving(content=b"of torch 2.14"))
    assert files_of(CacheEntry(other, tmp_path), "piece_0") == {"code": b"of torch 2.14"}


def test_a_piece_copied_under_another_name_is_rejected(tmp_path: Path):
    write(tmp_path)
    path = file_of(tmp_path)
    shutil.copyfile(path, path.with_name("piece_1.piece"))
    with pytest.warns(CompileCacheWarning, match="another key or piece, .* piece_0"):
        assert list(content(CacheEntry(key_of(), tmp_path))) == ["piece_0"]
