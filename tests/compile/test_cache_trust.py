"""What the compile cache refuses: what others may write, what is another's, links, what is huge."""

from __future__ import annotations

import json
import os
import shutil
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphrt.compile.cache import permissions, store
from graphrt.compile.cache.disk import CompileCache
from graphrt.compile.cache.key.parts import CacheKey
from graphrt.compile.cache.listing import stored_keys
from graphrt.compile.cache.store import ArtifactRecord, CompileCacheWarning, FileRecord, Manifest
from graphrt.errors import InvalidOptionError
from tests.compile.cache_keys import bytes_of, cache_key

SPARSE_BYTES = 1 << 40


def key_of() -> CacheKey:
    return cache_key({}, {"model": b"model"}, versions={"torch": "2.13.0"}, compiler={})


def unpacked(path: Path) -> None:
    (path / "ab").mkdir(parents=True)
    (path / "ab" / "graph").write_bytes(b"graph")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "above" / "cache"
    with CompileCache(root).open(key_of()) as entry:
        entry.store("piece_0", b"code")
        entry.store("piece_1", unpacked)
    return root


def places(root: Path) -> dict[str, Path]:
    rank = root / key_of().digest[:16] / "rank_0"
    run = next(rank.glob("run-*"))
    return {
        "ancestor": root.parent,
        "cache": root,
        "key": rank.parent,
        "rank": rank,
        "run": run,
        "directory": run / "piece_1" / "ab",
        "manifest": rank / "manifest.json",
        "file": run / "piece_0",
        "file below": run / "piece_1" / "ab" / "graph",
    }


WHOLE = ("ancestor", "cache", "key", "rank")
"""Where nothing of the cache is used, nor written."""
PARTS = {
    "run": {"piece_0", "piece_1"},
    "directory": {"piece_1"},
    "manifest": {"piece_0", "piece_1"},
    "file": {"piece_0"},
    "file below": {"piece_1"},
}
"""What is compiled again, and written anew beside it."""


def loaded(root: Path) -> tuple[set[str], str]:
    """The pieces that the cache gives, and what it says."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        entry = CompileCache(root).open(key_of())
        found = {name for name in ("piece_0", "piece_1") if entry.load(name) is not None}
    assert all(each.category is CompileCacheWarning for each in told)
    return found, "\n".join(str(each.message) for each in told)


def test_what_is_ours_alone_is_used(root: Path):
    assert loaded(root) == ({"piece_0", "piece_1"}, "")


@pytest.mark.parametrize("where", [*WHOLE, *PARTS])
@pytest.mark.parametrize("bits", [stat.S_IWGRP, stat.S_IWOTH])
def test_what_others_may_write_is_refused_by_name(root: Path, where: str, bits: int):
    path = places(root)[where]
    path.chmod(stat.S_IMODE(path.stat().st_mode) | bits)
    found, told = loaded(root)
    assert found == {"piece_0", "piece_1"} - PARTS.get(where, {"piece_0", "piece_1"})
    assert path.name in told and "may be written by others" in told and "chmod go-w" in told


@pytest.mark.parametrize("where", [*WHOLE, *PARTS])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_is_another_users_is_refused_by_name(root: Path, where: str):
    path = places(root)[where]
    os.chown(path, 12345, -1)
    found, told = loaded(root)
    assert found == {"piece_0", "piece_1"} - PARTS.get(where, {"piece_0", "piece_1"})
    assert path.name in told and "belongs to user 12345" in told


def test_owners_count_and_not_what_this_process_may_do(root: Path, monkeypatch: pytest.MonkeyPatch):
    """Another user's process: may it read ten times everything, it is not its own."""
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    found, told = loaded(root)
    if os.getuid() == 0:
        assert found == {"piece_0", "piece_1"}, "root's is as good as one's own"
    else:
        assert not found and "not to 4242 or root" in told


@pytest.mark.parametrize("where", WHOLE)
def test_nothing_is_written_where_others_may(root: Path, where: str):
    path = places(root)[where]
    path.chmod(0o777)
    before = sorted(root.rglob("*"))
    with pytest.warns(CompileCacheWarning, match="neither read nor written"):
        entry = CompileCache(root).open(key_of())
    entry.store("piece_2", lambda path: pytest.fail("refused already"))
    entry.write_text("computation_graph.py", "graph")
    assert not entry.complete() and sorted(root.rglob("*")) == before


@pytest.mark.parametrize("where", PARTS)
def test_a_part_that_is_refused_is_replaced_by_one_of_our_own(root: Path, where: str):
    path = places(root)[where]
    path.chmod(0o777)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entry = CompileCache(root).open(key_of())
        for name, payload in {"piece_0": b"code", "piece_1": unpacked}.items():
            if entry.load(name) is None:
                entry.store(name, payload)
    assert entry.complete()
    assert loaded(root) == ({"piece_0", "piece_1"}, "")


def test_a_directory_that_is_not_there_yet_is_judged_by_what_is_above_it(tmp_path: Path):
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o777)
    with pytest.warns(CompileCacheWarning, match="above may be written by others"):
        entry = CompileCache(above / "new" / "cache").open(key_of())
    entry.store("piece_0", b"code")
    assert not entry.complete() and not list(above.iterdir())


def test_a_sticky_directory_above_is_fine_and_is_no_cache_itself(tmp_path: Path):
    """As the temporary directory of a system is: others make their own there, and leave ours."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    root = shared / "ours"
    with CompileCache(root).open(key_of()) as entry:
        entry.store("piece_0", b"code")
    assert loaded(root) == ({"piece_0"}, "")
    shutil.copytree(root, shared, dirs_exist_ok=True)
    shared.chmod(0o1777)
    found, told = loaded(shared)
    assert not found and "shared may be written by others" in told


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_another_user_made_first_in_a_sticky_directory_is_not_taken(tmp_path: Path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    entry = CompileCache(shared / "ours").open(key_of())
    (shared / "ours").mkdir()
    os.chown(shared / "ours", 12345, -1)
    with pytest.warns(CompileCacheWarning, match="belongs to user 12345"):
        entry.store("piece_0", b"code")
    assert not entry.complete() and not list((shared / "ours").rglob("*piece*"))


@pytest.mark.parametrize("where", ["key", "rank", *PARTS])
def test_a_link_inside_of_the_cache_is_refused(root: Path, where: str, tmp_path: Path):
    path = places(root)[where]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    found, told = loaded(root)
    assert found == {"piece_0", "piece_1"} - PARTS.get(where, {"piece_0", "piece_1"})
    assert f"{path.name} is a symbolic link" in told


def test_a_link_to_the_cache_is_followed_and_what_it_leads_to_is_judged(root: Path, tmp_path: Path):
    link = tmp_path / "link"
    link.symlink_to(root.parent)
    assert loaded(link / "cache")[0] == {"piece_0", "piece_1"}
    root.parent.chmod(0o777)
    found, told = loaded(link / "cache")
    assert not found and "above may be written by others" in told


@pytest.mark.parametrize("where", ["manifest", "file"])
def test_a_pipe_is_refused_and_not_waited_for(root: Path, where: str):
    path = places(root)[where]
    path.unlink()
    os.mkfifo(path, 0o600)
    found, told = loaded(root)
    assert "piece_0" not in found and "is no file" in told


# What is swapped between judgement and use ---------------------------------------------------


@pytest.fixture
def after_judging(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], None]:
    """Call something once, right after the file or directory of that name was judged."""
    judge = permissions._judge

    def hook(name: str, meanwhile: Callable[[], object]) -> None:
        done = []

        def judging(found: os.stat_result, path: Path, *, above: bool) -> None:
            judge(found, path, above=above)
            if path.name == name and not done:
                done.append(path)
                meanwhile()

        monkeypatch.setattr(permissions, "_judge", judging)

    return hook


@pytest.mark.parametrize(
    "where", ["file", "file below", "run", "directory", "rank", "key", "cache"]
)
def test_what_is_put_in_its_place_after_it_was_judged_is_not_read(
    root: Path, where: str, after_judging: Callable[[str, Any], None], tmp_path: Path
):
    path = places(root)[where]
    entry = CompileCache(root).open(key_of())

    def swap() -> None:
        path.rename(tmp_path / "aside")
        if where.startswith("file"):
            path.write_bytes(b"evil")
        else:
            shutil.copytree(tmp_path / "aside", path)
            for each in path.rglob("*"):
                if each.is_file() and each.name != "manifest.json":
                    each.write_bytes(b"evil!")

    after_judging(path.name, swap)
    name = "piece_1" if where in ("file below", "directory") else "piece_0"
    artifact = entry.load(name)
    assert artifact is not None
    good = b"code" if name == "piece_0" else {"ab/graph": b"graph"}
    assert artifact.content == good
    assert any(b"evil" in each.read_bytes() for each in root.rglob("*") if each.is_file())


def test_what_grows_after_it_was_judged_is_not_read_further(
    root: Path, after_judging: Callable[[str, Any], None]
):
    path = places(root)["file"]
    after_judging(path.name, lambda: os.truncate(path, SPARSE_BYTES))
    artifact = CompileCache(root).open(key_of()).load("piece_0")
    assert artifact is not None and artifact.content == b"code"


def test_what_is_used_is_a_copy_that_nobody_else_may_write(root: Path, tmp_path: Path):
    artifact = CompileCache(root).open(key_of()).load("piece_1")
    assert artifact is not None
    umask = os.umask(0)
    try:
        written = artifact.write(tmp_path / "copy")
    finally:
        os.umask(umask)
    for each in (written, *written.rglob("*")):
        assert not each.stat().st_mode & 0o022, each
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(OSError, match="may be written by others"):
        artifact.write(shared / "copy")


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_what_we_write_is_ours_alone_whatever_the_umask(tmp_path: Path, umask: int):
    before = os.umask(umask)
    try:
        with CompileCache(tmp_path / "cache").open(key_of()) as entry:
            entry.store("piece_0", b"code")
            entry.store("piece_1", unpacked)
            entry.write_text("computation_graph.py", "graph")
    finally:
        os.umask(before)
    for each in (tmp_path / "cache").rglob("*"):
        assert not each.stat().st_mode & 0o022, each
    assert loaded(tmp_path / "cache") == ({"piece_0", "piece_1"}, "")


# Sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["manifest", "file", "file below"])
def test_a_huge_file_is_refused_unread(root: Path, where: str):
    os.truncate(places(root)[where], SPARSE_BYTES)
    found, told = loaded(root)
    assert found == {"piece_0", "piece_1"} - PARTS[where]
    assert str(SPARSE_BYTES) in told


def test_a_manifest_that_tells_of_a_huge_file_is_refused(root: Path):
    os.truncate(places(root)["file"], SPARSE_BYTES)
    record = FileRecord(f"{places(root)['run'].name}/piece_0", SPARSE_BYTES, "0" * 64)
    artifact = ArtifactRecord(record.path, False, (record,))
    forged = Manifest(key_of().digest, "2.13.0", 0.0, {"piece_0": artifact})
    places(root)["manifest"].write_bytes(forged.to_bytes())
    found, told = loaded(root)
    assert not found and "1024.0 GiB" in told


@pytest.mark.parametrize("size", [-1, 4.0, True, "4", None])
def test_a_manifest_with_a_size_that_is_none_is_damaged(root: Path, size: Any):
    record = FileRecord("run/piece_0", size, "0" * 64)
    artifact = ArtifactRecord("run/piece_0", False, (record,))
    forged = Manifest(key_of().digest, "2.13.0", 0.0, {"piece_0": artifact})
    places(root)["manifest"].write_bytes(forged.to_bytes())
    found, told = loaded(root)
    assert not found and "manifest cannot be read" in told


def test_a_manifest_of_brackets_is_damaged(root: Path):
    places(root)["manifest"].write_text("[" * 1_000_000)
    found, told = loaded(root)
    assert not found and "manifest cannot be read" in told


def test_listing_reads_nothing_huge_and_nothing_of_others(root: Path):
    os.truncate(root / key_of().digest[:16] / "key.json", SPARSE_BYTES)
    (key,) = stored_keys(root)
    assert key.key is None and key.ranks[0].state == "complete"
    os.truncate(places(root)["file"], SPARSE_BYTES)
    assert str(SPARSE_BYTES) in key.ranks[0].damaged_artifacts()["piece_0"]
    places(root)["rank"].chmod(0o777)
    (key,) = stored_keys(root)
    assert key.ranks[0].damage is not None and "may be written by others" in key.ranks[0].damage


def test_a_huge_text_in_the_way_is_written_over_unread(root: Path):
    text = places(root)["rank"] / "computation_graph.py"
    text.touch()
    os.truncate(text, SPARSE_BYTES)
    with CompileCache(root).open(key_of()) as entry:
        entry.write_text("computation_graph.py", "graph")
    assert text.read_text() == "graph"


def test_an_artifact_that_could_not_be_loaded_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store, "MOST_ARTIFACT_BYTES", 8)
    entry = CompileCache(tmp_path).open(key_of())
    with pytest.raises(InvalidOptionError, match="too large for the compile cache"):
        entry.store("piece_0", b"123456789")
    entry.store("piece_1", b"12345678")
    assert entry.complete()
    later = CompileCache(tmp_path).open(key_of())
    assert later.names == ("piece_1",) and bytes_of(later, "piece_1") == b"12345678"


def test_a_file_that_an_artifact_does_not_name_is_not_part_of_it(root: Path):
    """A library that was put beside the others would be loaded with them."""
    (places(root)["directory"] / "extra.so").write_bytes(b"\x7fELF")
    artifact = CompileCache(root).open(key_of()).load("piece_1")
    assert artifact is not None and artifact.content == {"ab/graph": b"graph"}


def test_a_manifest_that_mixes_artifacts_is_refused(root: Path):
    text = json.loads(places(root)["manifest"].read_bytes())
    run = places(root)["run"].name
    files = text["entry"]["artifacts"]["piece_0"]["files"]
    record = FileRecord(**files[0])
    artifact = ArtifactRecord(f"{run}/piece_1", True, (record,))
    forged = Manifest(key_of().digest, "2.13.0", 0.0, {"piece_1": artifact})
    places(root)["manifest"].write_bytes(forged.to_bytes())
    found, told = loaded(root)
    assert not found and "outside" in told
