"""Artifacts of torch's own compiler in the cache; one kernel call, so that no C++ is built."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from graphrt.compile import CompileOptions
from graphrt.compile.cache.disk import CompileCache
from graphrt.compile.cache.key.parts import CacheKey, code_settings
from graphrt.compile.cache.key.sources import TracedSources
from graphrt.compile.cache.store import CompileCacheWarning
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
    sources = TracedSources()
    sources.add(forward)
    return cache_key(code_settings(CompileOptions()), sources)


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
    with CompileCache(tmp_path / "here", save_format=save_format).open(key) as entry:
        entry.store("piece_0", lambda p: compiled.save(path=str(p), format=entry.save_format))
    shutil.move(tmp_path / "here", tmp_path / "there")
    cache = CompileCache(tmp_path / "there")
    found = cache.open(key).load("piece_0")
    assert found is not None
    path = found.write(tmp_path / "private")
    assert path.is_dir() == (save_format == "unpacked")
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    torch.testing.assert_close(load(path)(x, y)[0], x @ y)
    assert cache.open(key).load("piece_0") == found, "what loading adds is elsewhere"


def test_a_damaged_piece_never_reaches_the_compiler(compiled: Any, key: CacheKey, tmp_path: Path):
    with CompileCache(tmp_path).open(key) as entry:
        entry.store("piece_0", lambda path: compiled.save(path=str(path), format="binary"))
    path = next(tmp_path.rglob("run-*/piece_0"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.warns(CompileCacheWarning, match="checksum"):
        assert CompileCache(tmp_path).open(key).load("piece_0") is None
