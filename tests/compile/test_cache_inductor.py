"""Artifacts of torch's own compiler in the cache; one kernel call, so that no C++ is built."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from graphrt.compile import CompileOptions
from graphrt.compile.cache.entry import CacheEntry
from graphrt.compile.cache.key.parts import CacheKey, code_settings
from graphrt.compile.cache.store import CompileCacheWarning, unpack
from tests.compile.cache_keys import cache_key

inductor = pytest.importorskip("torch._inductor.standalone_compile")


# make_fx would take annotations that are strings into its graph, and torch cannot pickle those.
def forward(x, y):
    return (torch.mm(x, y),)


@pytest.fixture(scope="module")
def compiled() -> Any:
    from torch._inductor import standalone_compile
    from torch.fx.experimental.proxy_tensor import make_fx

    examples = [torch.randn(8, 8), torch.randn(8, 8)]
    graph = make_fx(forward, tracing_mode="fake")(*examples)
    return standalone_compile(graph, examples, dynamic_shapes="from_graph")


@pytest.fixture(scope="module")
def key() -> CacheKey:
    return cache_key(code_settings(CompileOptions()), {"forward": forward.__code__.co_code})


def load(path: Path) -> Any:
    """As a process would whose own compiler cache is empty."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        saved = "unpacked" if path.is_dir() else "binary"
        return inductor.CompiledArtifact.load(path=str(path), format=saved)


@pytest.mark.parametrize("save_format", ["binary", "unpacked"])
def test_a_compiled_piece_runs_from_a_copied_cache(
    compiled: Any, key: CacheKey, tmp_path: Path, save_format: str
):
    entry = CacheEntry(key, tmp_path / "here", save_format=save_format)
    entry.store("piece_0", lambda p: compiled.save(path=str(p / "code"), format=save_format))
    shutil.move(tmp_path / "here", tmp_path / "there")
    later = CacheEntry(key, tmp_path / "there")
    archive = later.load("piece_0")
    assert archive is not None
    unpack(archive, tmp_path / "private")
    path = tmp_path / "private" / "code"
    assert path.is_dir() == (save_format == "unpacked")
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    torch.testing.assert_close(load(path)(x, y)[0], x @ y)
    assert later.load("piece_0") == archive, "what loading adds is elsewhere"


def test_a_damaged_piece_never_reaches_the_compiler(compiled: Any, key: CacheKey, tmp_path: Path):
    entry = CacheEntry(key, tmp_path)
    entry.store("piece_0", lambda p: compiled.save(path=str(p / "code"), format="binary"))
    path = next(tmp_path.rglob("piece_0.piece"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.warns(CompileCacheWarning, match="checksum"):
        assert CacheEntry(key, tmp_path).load("piece_0") is None
