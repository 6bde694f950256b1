"""What the compile cache refuses: what others may write, what is another's, links, what is huge."""

from __future__ import annotations

import os
import shutil
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphrt.compile.cache import permissions, store
from graphrt.compile.cache.entry import CacheEntry
from graphrt.compile.cache.key.parts import CacheKey
from graphrt.compile.cache.listing import stored_keys
from graphrt.compile.cache.store import CompileCacheWarning, unpack
from graphrt.errors import InvalidOptionError
from tests.compile.cache_keys import cache_key, files_of, saving

SPARSE_BYTES = 1 << 40


def key_of() -> CacheKey:
    return cache_key({}, {"model": b"model"}, versions={"torch": "2.13.0"}, compiler={})


def opened(root: Path) -> CacheEntry:
    return CacheEntry(key_of(), root)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "above" / "cache"
    entry = opened(root)
    entry.store("piece_0", saving())
    entry.store("piece_1", saving("ab/graph"))
    return root


def places(root: Path) -> dict[str, Path]:
    rank = root / key_of().digest[:16] / "rank_0"
    return {
        "ancestor": root.parent,
        "cache": root,
        "key": rank.parent,
        "rank": rank,
        "file": rank / "piece_0.piece",
    }


WHOLE = ("ancestor", "cache", "key", "rank")
"""Where nothing of the cache is used, nor written."""
BOTH = {"piece_0", "piece_1"}


def left(where: str) -> set[str]:
    """The pieces that are used where a place is refused."""
    return {"piece_1"} if where == "file" else set()


def loaded(root: Path) -> tuple[set[str], str]:
    """The pieces that the cache gives, and what it says."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        entry = opened(root)
        pieces = {name for name in BOTH if entry.load(name) is not None}
    assert all(each.category is CompileCacheWarning for each in told)
    return pieces, "\n".join(str(each.message) for each in told)


def test_a_cache_writable_by_its_owner_alone_is_used(root: Path):
    assert loaded(root) == (BOTH, "")


@pytest.mark.parametrize("where", [*WHOLE, "file"])
@pytest.mark.parametrize("bits", [stat.S_IWGRP, stat.S_IWOTH])
def test_a_cache_path_writable_by_other_users_is_refused_by_name(root: Path, where: str, bits: int):
    path = places(root)[where]
    path.chmod(stat.S_IMODE(path.stat().st_mode) | bits)
    pieces, told = loaded(root)
    assert pieces == left(where)
    assert path.name in told and "may be written by others" in told and "chmod go-w" in told


@pytest.mark.parametrize("where", [*WHOLE, "file"])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_cache_path_owned_by_another_user_is_refused_by_name(root: Path, where: str):
    path = places(root)[where]
    os.chown(path, 12345, -1)
    pieces, told = loaded(root)
    assert pieces == left(where)
    assert path.name in told and "belongs to user 12345" in told


def test_a_cache_owned_by_another_user_is_refused_though_readable(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    """Another user's process: may it read ten times everything, it is not its own."""
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    pieces, told = loaded(root)
    if os.getuid() == 0:
        assert pieces == BOTH, "root's is as good as one's own"
    else:
        assert not pieces and "not to 4242 or root" in told


@pytest.mark.parametrize("where", WHOLE)
def test_no_piece_is_written_into_a_path_writable_by_other_users(root: Path, where: str):
    path = places(root)[where]
    path.chmod(0o777)
    before = sorted(root.rglob("*"))
    with pytest.warns(CompileCacheWarning, match="neither read nor written"):
        entry = opened(root)
    entry.store("piece_2", lambda path: pytest.fail("refused already"))
    entry.write_text("computation_graph.py", "graph")
    assert sorted(root.rglob("*")) == before


def test_a_refused_piece_is_replaced_by_a_newly_compiled_piece(root: Path):
    places(root)["file"].chmod(0o666)
    entry = opened(root)
    with pytest.warns(CompileCacheWarning, match="may be written by others"):
        assert entry.load("piece_0") is None
    entry.store("piece_0", saving())
    assert loaded(root) == (BOTH, "")


def test_a_missing_cache_directory_is_checked_by_its_parent(tmp_path: Path):
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o777)
    with pytest.warns(CompileCacheWarning, match="above may be written by others"):
        entry = opened(above / "new" / "cache")
    entry.store("piece_0", saving())
    assert not list(above.iterdir())


def test_a_sticky_directory_is_accepted_as_parent_and_refused_as_cache(tmp_path: Path):
    """As the temporary directory of a system is: others make their own there, and leave ours."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    root = shared / "ours"
    opened(root).store("piece_0", saving())
    assert loaded(root) == ({"piece_0"}, "")
    shutil.copytree(root, shared, dirs_exist_ok=True)
    shared.chmod(0o1777)
    pieces, told = loaded(shared)
    assert not pieces and "shared may be written by others" in told


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_cache_made_by_another_user_in_a_sticky_directory_is_refused(tmp_path: Path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    entry = opened(shared / "ours")
    (shared / "ours").mkdir()
    os.chown(shared / "ours", 12345, -1)
    with pytest.warns(CompileCacheWarning, match="belongs to user 12345"):
        entry.store("piece_0", saving())
    assert not list((shared / "ours").rglob("*piece*"))


@pytest.mark.parametrize("where", ["key", "rank", "file"])
def test_a_symbolic_link_inside_the_cache_is_refused(root: Path, where: str, tmp_path: Path):
    path = places(root)[where]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    pieces, told = loaded(root)
    assert pieces == left(where)
    assert f"{path.name} is a symbolic link" in told


def test_a_symbolic_link_to_the_cache_is_followed_and_its_target_checked(
    root: Path, tmp_path: Path
):
    link = tmp_path / "link"
    link.symlink_to(root.parent)
    assert loaded(link / "cache")[0] == BOTH
    root.parent.chmod(0o777)
    pieces, told = loaded(link / "cache")
    assert not pieces and "above may be written by others" in told


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_link_of_another_user_in_the_path_of_the_cache_is_refused(root: Path, tmp_path: Path):
    """Its owner may turn it while a piece is written, and have code of theirs packed."""
    link = tmp_path / "link"
    link.symlink_to(root.parent)
    os.chown(link, 12345, -1, follow_symlinks=False)
    pieces, told = loaded(link / "cache")
    assert not pieces
    assert "belongs to user 12345" in told


def test_a_named_pipe_in_the_cache_is_refused_without_blocking(root: Path):
    path = places(root)["file"]
    path.unlink()
    os.mkfifo(path, 0o600)
    pieces, told = loaded(root)
    assert "piece_0" not in pieces and "is no file" in told


# What is swapped between judgement and use ---------------------------------------------------


@pytest.fixture
def after_judging(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], None]:
    """Call something once, right after the file or directory of that name was judged."""
    judge = permissions._check_owner

    def hook(name: str, meanwhile: Callable[[], object]) -> None:
        done = []

        def judging(pieces: os.stat_result, path: Path, *, above: bool) -> None:
            judge(pieces, path, above=above)
            if path.name == name and not done:
                done.append(path)
                meanwhile()

        monkeypatch.setattr(permissions, "_check_owner", judging)

    return hook


@pytest.mark.parametrize("where", ["file", "rank", "key", "cache"])
def test_a_path_swapped_after_its_check_is_not_read(
    root: Path, where: str, after_judging: Callable[[str, Any], None], tmp_path: Path
):
    path = places(root)[where]
    entry = opened(root)

    def swap() -> None:
        path.rename(tmp_path / "aside")
        if where == "file":
            path.write_bytes(b"evil")
        else:
            shutil.copytree(tmp_path / "aside", path)
            for each in path.rglob("*.piece"):
                each.write_bytes(b"evil")

    after_judging(path.name, swap)
    assert files_of(entry, "piece_0") == {"code": b"code"}
    assert any(b"evil" in each.read_bytes() for each in root.rglob("*") if each.is_file())


def test_a_file_that_grows_after_its_check_is_read_to_the_checked_size(
    root: Path, after_judging: Callable[[str, Any], None]
):
    path = places(root)["file"]
    after_judging(path.name, lambda: os.truncate(path, SPARSE_BYTES))
    assert files_of(opened(root), "piece_0") == {"code": b"code"}


def test_pieces_are_unpacked_only_where_no_other_user_may_write(root: Path, tmp_path: Path):
    archive = opened(root).load("piece_1")
    assert archive is not None
    umask = os.umask(0)
    try:
        unpack(archive, tmp_path / "copy")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "copy").stat().st_mode) == 0o700
    assert (tmp_path / "copy" / "ab" / "graph").read_bytes() == b"code"
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(OSError, match="may be written by others"):
        unpack(archive, shared / "copy")


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_written_cache_files_are_private_whatever_the_umask(tmp_path: Path, umask: int):
    before = os.umask(umask)
    try:
        entry = CacheEntry(key_of(), tmp_path / "cache", save_format="unpacked")
        entry.store("piece_0", saving())
        entry.store("piece_1", saving("ab/graph"))
        entry.write_text("computation_graph.py", "graph")
    finally:
        os.umask(before)
    for each in entry.directory.iterdir():
        assert not each.stat().st_mode & 0o022, each
    assert loaded(tmp_path / "cache") == (BOTH, "")


# Sizes --------------------------------------------------------------------------------------


def test_a_huge_cache_file_is_refused_without_reading(root: Path):
    os.truncate(places(root)["file"], SPARSE_BYTES)
    pieces, told = loaded(root)
    assert pieces == {"piece_1"} and str(SPARSE_BYTES) in told


def test_listing_reads_no_huge_files_and_no_files_of_other_users(root: Path):
    os.truncate(places(root)["file"], SPARSE_BYTES)
    (key,) = stored_keys(root)
    assert list(key.damaged("0")) == ["piece_0"]
    assert str(SPARSE_BYTES) in key.damaged("0")["piece_0"]
    places(root)["rank"].chmod(0o777)
    assert "may be written by others" in key.damaged("0")["piece_1"]
    os.truncate(root / key_of().digest[:16] / "key.json", SPARSE_BYTES)
    (key,) = stored_keys(root)
    assert key.key is None and key.pieces == 2


def test_a_huge_text_file_is_overwritten_without_reading(root: Path):
    text = places(root)["rank"] / "computation_graph.py"
    text.touch()
    os.truncate(text, SPARSE_BYTES)
    opened(root).write_text("computation_graph.py", "graph")
    assert text.read_text() == "graph"


def test_a_piece_too_large_to_load_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store, "MOST_PIECE_BYTES", 500)
    entry = opened(tmp_path)
    with pytest.raises(InvalidOptionError, match="too large for the compile cache"):
        entry.store("piece_0", saving(content=bytes(500)))
    entry.store("piece_1", saving())
    assert loaded(tmp_path) == ({"piece_1"}, "")


def test_an_extra_file_beside_a_piece_is_not_loaded_with_the_piece(root: Path):
    """A library that was put beside the others would be loaded with them."""
    (places(root)["rank"] / "extra.so").write_bytes(b"\x7fELF")
    assert files_of(opened(root), "piece_1") == {"ab/graph": b"code"}
