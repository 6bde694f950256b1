"""Inductor's own folders: what another user may have put there is neither run nor kept."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from graphrt.compile import CompileOptions, compile_module
from graphrt.compile.backend import process
from graphrt.compile.backend.process import trusted_folders
from graphrt.compile.cache.store import CompileCacheWarning
from graphrt.compile.errors import CompileError

OTHER_USER = 12345
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory of a system, which everybody may write, and which is sticky."""
    import torch._inductor.config  # noqa: F401  sets TORCHINDUCTOR_CACHE_DIR

    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    monkeypatch.setattr(process, "_walked", set())
    monkeypatch.setattr(process, "_own_folders", {})
    monkeypatch.setattr(process, "_directories", {})
    before = os.umask(0o022)
    yield shared
    os.umask(before)


@pytest.fixture
def folder(shared: Path) -> Path:
    """Inductor's own, with a library in it, made by this user."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = Path(default_cache_dir())
    assert folder.parent == shared
    (folder / "ab").mkdir(parents=True)
    (folder / "ab" / "code.so").write_bytes(b"\x7fELF")
    return folder


def used() -> tuple[str | None, bool, str]:
    """The folder that Inductor uses, whether it keeps C++ headers, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CompileCacheWarning)
        with trusted_folders():
            folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
            headers = torch._inductor.config.cpp_cache_precompile_headers
    told = [str(each.message) for each in caught if each.category is CompileCacheWarning]
    return folder, headers, "\n".join(told)


def is_private(folder: str | None) -> bool:
    return folder is not None and not Path(folder).stat().st_mode & 0o077


def test_a_folder_of_this_user_alone_is_used_as_it_is(folder: Path):
    assert used() == (None, True, "")
    shutil.rmtree(folder)
    assert used() == (None, True, "")
    assert is_private(str(folder)), "made before another user makes it"


def give_away(path: Path) -> None:
    os.chown(path, OTHER_USER, -1)


def group_writes(path: Path) -> None:
    path.chmod(0o770)


def everybody_writes(path: Path) -> None:
    path.chmod(0o777)


def link_elsewhere(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


@pytest.mark.parametrize("where", ["", "ab", "ab/code.so"])
@pytest.mark.parametrize(
    "change", [pytest.param(give_away, marks=only_root), group_writes, everybody_writes]
)
def test_a_folder_that_another_user_may_have_filled_is_replaced_by_a_private_folder(
    folder: Path, where: str, change: Callable[[Path], None]
):
    change(folder / where)
    instead, headers, told = used()
    assert instead != str(folder) and is_private(instead) and not headers
    assert (folder / where).name in told and "is not used" in told
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


@pytest.mark.parametrize("where", ["ab", "ab/code.so"])
def test_a_link_inside_of_the_folder_is_refused(folder: Path, where: str):
    link_elsewhere(folder / where)
    instead, headers, told = used()
    assert is_private(instead) and not headers and "is a symbolic link" in told


def test_a_link_to_the_folder_is_followed_once_and_its_target_is_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    link = folder.with_name("link")
    link.symlink_to(folder)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(link))
    assert used() == (str(folder), True, "")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(link)


@only_root
def test_a_planted_link_in_place_of_the_folder_is_not_followed_to_another_user(
    folder: Path, tmp_path: Path
):
    theirs = tmp_path / "theirs"
    shutil.move(folder, theirs)
    give_away(theirs)
    folder.symlink_to(theirs)
    os.chown(folder, OTHER_USER, -1, follow_symlinks=False)
    instead, headers, told = used()
    assert is_private(instead) and not headers and "belongs to user 12345" in told
    folder.unlink()
    folder.symlink_to(tmp_path / "missing")
    assert is_private(used()[0])


def test_a_parent_that_others_may_write_is_refused_unless_it_is_sticky(
    folder: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
):
    above = shared / "above"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(above / "inductor"))
    (above / "inductor").mkdir(parents=True)
    above.chmod(0o777)
    instead, headers, told = used()
    assert is_private(instead) and headers and "above may be written by others" in told
    above.chmod(0o1777)
    assert used() == (str(above / "inductor"), True, "")


@only_root
def test_a_foreign_header_folder_alone_leaves_headers_out(
    folder: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
):
    give_away(folder)
    own = shared / "own"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(own))
    instead, headers, told = used()
    assert instead == str(own) and not headers and folder.name in told


@only_root
def test_a_foreign_folder_of_triton_is_replaced_too(
    folder: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
):
    triton = shared / "triton"
    triton.mkdir()
    give_away(triton)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(triton))
    with pytest.warns(CompileCacheWarning, match="triton belongs to user 12345"), trusted_folders():
        assert is_private(str(Path(os.environ["TRITON_CACHE_DIR"]).parent))
    assert os.environ["TRITON_CACHE_DIR"] == str(triton)


def test_a_folder_in_which_this_process_makes_shared_directories_is_refused_if_others_enter_it(
    folder: Path,
):
    os.umask(0o002)
    instead, _, told = used()
    assert is_private(instead) and "umask" in told
    folder.chmod(0o700)
    (folder / "ab").chmod(0o775)
    assert used() == (None, True, "")


def test_a_folder_that_is_made_again_by_another_user_is_checked_again(folder: Path):
    assert used() == (None, True, "")
    shutil.rmtree(folder)
    folder.mkdir(mode=0o700)
    folder.chmod(0o777)
    assert is_private(used()[0])


def test_where_others_may_write_everywhere_nothing_is_compiled(folder: Path, shared: Path):
    shared.chmod(0o777)
    with (
        pytest.warns(CompileCacheWarning),
        pytest.raises(CompileError, match="TMPDIR"),
        trusted_folders(),
    ):
        pass


@only_root
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor on the CPU needs g++")
@pytest.mark.long
def test_nothing_of_another_users_folder_gets_into_compiled_code(folder: Path, tmp_path: Path):
    for each in (folder, *folder.rglob("*")):
        give_away(each)
    before = sorted(folder.rglob("*"))
    options = CompileOptions(backend="inductor", cache_dir=str(tmp_path / "cache"))
    compiled = compile_module(lambda x: x.sin() * 2, ["x"], options=options)
    x = torch.randn(5, 4)
    with pytest.warns(CompileCacheWarning, match="belongs to user 12345"):
        torch.testing.assert_close(compiled(x), x.sin() * 2)
    assert sorted(folder.rglob("*")) == before
    assert list((tmp_path / "cache").rglob("*.piece"))


@only_root
def test_a_link_of_another_user_to_a_folder_of_ours_is_refused(folder: Path):
    """Its owner may turn it to another folder after the check: headers went through it."""
    ours = folder.rename(folder.with_name("ours"))
    folder.symlink_to(ours)
    os.chown(folder, OTHER_USER, -1, follow_symlinks=False)
    instead, headers, told = used()
    assert is_private(instead)
    assert not headers
    assert f"belongs to user {OTHER_USER}" in told


@only_root
def test_a_link_of_ours_where_another_user_may_replace_it_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, OTHER_USER, -1)
    (theirs / "link").symlink_to(folder)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(theirs / "link"))
    instead, _, told = used()
    assert is_private(instead)
    assert f"{theirs} belongs to user {OTHER_USER}" in told
