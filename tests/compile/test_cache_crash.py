"""Killed writers, writers that race, bytes that changed: a cache works or misses, never lies."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from graphrt.compile.cache.disk import CompileCache
from graphrt.compile.cache.entry import CacheEntry
from graphrt.compile.cache.key.parts import CacheKey
from graphrt.compile.cache.listing import remove, stored_keys
from graphrt.compile.cache.store import MANIFEST, CompileCacheWarning
from tests.compile.cache_keys import bytes_of, cache_key

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")

PIECES = {"piece_0": b"zero " * 40, "piece_1": b"one " * 40}
FILES = ("open", "os.", "shutil.")
DONE, KILLED = 0, 77


def key_of(source: bytes = b"model") -> CacheKey:
    return cache_key({}, {"model": source}, versions={"torch": "2.13.0"}, compiler={})


def unpacked(path: Path) -> None:
    (path / "ab").mkdir(parents=True)
    (path / "ab" / "graph").write_bytes(b"graph")
    (path / "code.py").write_bytes(b"x = 1")


def write(directory: Path) -> None:
    entry = CompileCache(directory).open(key_of())
    entry.write_text("computation_graph.py", "graph")
    for name, content in PIECES.items():
        entry.store(name, content)
    entry.store("piece_2", unpacked)
    entry.complete()


def add(directory: Path) -> None:
    with CompileCache(directory).open(key_of()) as entry:
        entry.store("piece_3", b"three")


def replace(directory: Path) -> None:
    """What follows on a damaged artifact."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entry = CompileCache(directory).open(key_of())
        entry.load("piece_0")
        entry.reject("piece_0", "does not run")
    entry.store("piece_0", PIECES["piece_0"])
    entry.complete()


def remove_all(directory: Path) -> None:
    remove(stored_keys(directory))


def content(entry: CacheEntry) -> dict[str, bytes]:
    """Everything that the entry has; fails if any of it is not what was written."""
    found = {}
    for name in entry.names:
        artifact = entry.load(name)
        assert artifact is not None, name
        if isinstance(artifact.content, bytes):
            found[name] = artifact.content
        else:
            assert artifact.content["ab/graph"] == b"graph"
    return found


def killed_at(number: int, torn: bool, work: Callable[[Path], None], directory: Path) -> int:
    """Run `work` in a process that dies at its `number`-th call of the file system.

    Files reach the disk at `fsync`; a torn one has only half of its bytes there.
    """
    child = os.fork()
    if child == 0:
        calls = 0

        def count() -> bool:
            nonlocal calls
            calls += 1
            return calls == number

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            # Imports open files too; a tree is removed by names without a directory.
            ours = str(directory) in str(arguments[:1]) or event in ("os.remove", "os.rmdir")
            if event.startswith(FILES) and ours and count():
                os._exit(KILLED)

        def sync(descriptor: int) -> None:
            if count():
                name = os.readlink(f"/proc/self/fd/{descriptor}")
                if torn and os.path.isfile(name):
                    os.truncate(name, os.path.getsize(name) // 2)
                os._exit(KILLED)

        os.fsync = sync
        sys.addaudithook(watch)
        try:
            work(directory)
        except BaseException:
            os._exit(1)
        os._exit(DONE)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


WORKS = [(write, False), (add, True), (replace, True), (remove_all, True)]


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize(("work", "filled"), WORKS, ids=[work.__name__ for work, _ in WORKS])
def test_killed_at_any_point(
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
            entry = CompileCache(directory).open(key_of())
            loaded = content(entry)
            if entry.found:
                assert PIECES.items() <= loaded.items()
            else:
                assert work in (write, remove_all)
            write(directory)
            assert PIECES.items() <= content(CompileCache(directory).open(key_of())).items()
        shutil.rmtree(directory)
        if code == DONE:
            break
    assert code == DONE and number > 8, "every point was tried"


def race(directory: Path, rounds: int, barrier: object, results: object) -> None:
    mine = f"{os.getpid()} ".encode() * 50
    for number in range(rounds):
        barrier.wait()
        cache = CompileCache(directory)
        entry = cache.open(key_of(b"%d" % number))
        for name in ("piece_0", "piece_1", "piece_2"):
            entry.store(name, mine)
        won = entry.complete()
        seen = [bytes_of(entry, name) for name in entry.names]
        whole = len(seen) == 3 and len(set(seen)) == 1 and seen[0] is not None
        results.put((number, won, whole, cache.figures.damaged, won == (seen[0] == mine)))


def read(directory: Path, stop: object, results: object) -> None:
    reads = bad = 0
    while not stop.is_set():
        for number in range(0, 100, 7):
            cache = CompileCache(directory)
            entry = cache.open(key_of(b"%d" % number))
            seen = {bytes_of(entry, name) for name in entry.names}
            reads += entry.found
            bad += cache.figures.damaged + (entry.found and (len(seen) != 1 or None in seen))
    results.put((reads, bad))


def test_of_writers_that_race_one_wins_and_readers_see_whole_entries(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    writers, rounds = 4, 100
    barrier, results = context.Barrier(writers), context.Queue()
    stop, figures = context.Event(), context.Queue()
    reader = context.Process(target=read, args=(tmp_path, stop, figures))
    processes = [
        context.Process(target=race, args=(tmp_path, rounds, barrier, results))
        for _ in range(writers)
    ]
    for each in (reader, *processes):
        each.start()
    found = [results.get(timeout=60) for _ in range(writers * rounds)]
    stop.set()
    reads, bad = figures.get(timeout=60)
    for each in (reader, *processes):
        each.join(timeout=60)
        assert each.exitcode == 0
    for number in range(rounds):
        of_round = [each for each in found if each[0] == number]
        assert sum(won for _, won, _, _, _ in of_round) == 1
    assert all(whole and damaged == 0 and own for _, _, whole, damaged, own in found)
    assert reads > 0 and bad == 0
    assert len(list(tmp_path.rglob("run-*"))) == rounds, "the losers left nothing"


def test_of_two_that_repair_the_first_is_kept(tmp_path: Path):
    write(tmp_path)
    entries = [CompileCache(tmp_path).open(key_of()) for _ in range(2)]
    for number, entry in enumerate(entries):
        entry.load("piece_0")
        with pytest.warns(CompileCacheWarning):
            entry.reject("piece_0", "does not run")
        entry.store("piece_0", b"%d" % number)
    assert entries[0].complete() and not entries[1].complete()
    assert bytes_of(CompileCache(tmp_path).open(key_of()), "piece_0") == b"0"


# Damage ----------------------------------------------------------------------------------------


def files_of(directory: Path) -> dict[str, Path]:
    (manifest,) = directory.rglob(MANIFEST)
    run = next(each for each in manifest.parent.iterdir() if each.is_dir())
    return {
        "manifest": manifest,
        "file": run / "piece_0",
        "unpacked": run / "piece_2" / "ab" / "graph",
    }


@pytest.mark.parametrize("which", ["manifest", "file", "unpacked"])
def test_a_flipped_bit_is_a_warning_and_a_miss(tmp_path: Path, which: str):
    write(tmp_path)
    path = files_of(tmp_path)[which]
    good = path.read_bytes()
    chosen = random.Random(0)
    for position in [0, len(good) - 2, *(chosen.randrange(len(good)) for _ in range(60))]:
        bad = bytearray(good)
        bad[position] ^= 1 << chosen.randrange(8)
        path.write_bytes(bad)
        cache = CompileCache(tmp_path)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            entry = cache.open(key_of())
            loaded = {name: entry.load(name) for name in ("piece_0", "piece_1", "piece_2")}
        if which == "manifest" and not told:
            # Only white space of the JSON text can change unnoticed.
            assert bytes(bad).split() == good.split() or all(loaded.values())
            continue
        assert [each.category for each in told] == [CompileCacheWarning]
        assert "compiled again" in str(told[0].message)
        assert cache.figures.damaged == 1
        missing = {"manifest": 3, "file": 1, "unpacked": 1}[which]
        assert list(loaded.values()).count(None) == missing == cache.figures.misses


@pytest.mark.parametrize("which", ["manifest", "file", "unpacked"])
@pytest.mark.parametrize("damage", ["empty", "cut", "longer", "gone"])
def test_damage_is_repaired_by_the_next_store(tmp_path: Path, which: str, damage: str):
    write(tmp_path)
    path = files_of(tmp_path)[which]
    good = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "cut": good[:-2], "longer": good + b"x"}[damage])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entry = CompileCache(tmp_path).open(key_of())
        missing = [name for name in (*PIECES, "piece_2") if entry.load(name) is None]
    assert missing
    for name in missing:
        entry.store(name, PIECES.get(name, unpacked))
    assert entry.complete()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        later = CompileCache(tmp_path).open(key_of())
        assert content(later) == PIECES
        assert set(later.names) == {*PIECES, "piece_2"}


def test_an_entry_of_another_key_is_foreign(tmp_path: Path):
    write(tmp_path)
    other = cache_key({}, {"model": b"model"}, versions={"torch": "2.14.0"}, compiler={})
    shutil.copytree(tmp_path / key_of().digest[:16], tmp_path / other.digest[:16])
    cache = CompileCache(tmp_path)
    with pytest.warns(CompileCacheWarning, match=r"another key, \w+ \(torch 2.13.0\)"):
        entry = cache.open(other)
    assert not entry.found and entry.load("piece_0") is None
    assert cache.figures.damaged == 1
    entry.store("piece_0", b"of torch 2.14")
    assert entry.complete()
    assert bytes_of(CompileCache(tmp_path).open(other), "piece_0") == b"of torch 2.14"


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"magic": "else"}', "\x00" * 64])
def test_a_manifest_of_something_else_is_foreign(tmp_path: Path, text: str):
    write(tmp_path)
    files_of(tmp_path)["manifest"].write_text(text)
    with pytest.warns(CompileCacheWarning, match="manifest"):
        assert not CompileCache(tmp_path).open(key_of()).found


def test_a_manifest_names_no_file_outside(tmp_path: Path):
    write(tmp_path)
    manifest = files_of(tmp_path)["manifest"]
    from graphrt.compile.cache.store import ArtifactRecord, FileRecord, Manifest

    (tmp_path / "secret").write_bytes(b"code")
    file = FileRecord("../../secret", 4, hashlib.sha256(b"code").hexdigest())
    artifact = ArtifactRecord("../../secret", False, (file,))
    forged = Manifest(key_of().digest, "2.13.0", 0.0, {"piece_0": artifact})
    manifest.write_bytes(forged.to_bytes())
    with pytest.warns(CompileCacheWarning, match="outside"):
        assert CompileCache(tmp_path).open(key_of()).load("piece_0") is None
