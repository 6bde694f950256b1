"""What hits the compile cache and what misses it, from `graphrt.compile` to the pieces."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from graphrt.compile import CompileOptions, compile_module

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor on the CPU needs g++")

TRACED = "from untraced import NAME\n\ndef forward(x):\n    return (x * 3).relu()\n"
UNTRACED = "NAME = 'a'\n"


class Start:
    """What a new process would do with the sources of a directory, one after the other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.edit("traced.py", TRACED)
        self.edit("untraced.py", UNTRACED)

    def edit(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)

    def __call__(self, capture_sizes: list[int] | None = None, **options: Any) -> tuple[int, int]:
        """How many pieces were compiled, and how many loaded."""
        sys.modules.pop("untraced", None)
        # Bytecode of a file that was edited within a second is not told apart.
        shutil.rmtree(self.directory / "__pycache__", ignore_errors=True)
        keywords = {"backend": "inductor", "cache_dir": str(self.directory / "kept"), **options}
        compiled = compile_module(
            _imported(self.directory / "traced.py").forward,
            ["x"],
            options=CompileOptions(**keywords),
        )
        if capture_sizes is not None:
            compiled.use_capture_sizes(capture_sizes)
        compiled.ensure_compiled(torch.ones(3, 4))
        return compiled.figures.compilations, compiled.figures.loads


def _imported(path: Path) -> Any:
    # The module of a file keeps its name, as in another process.
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def of_inductor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inductor's own cache: what one start has had g++ compile, others need not."""
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_inductor: Path) -> Start:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(of_inductor))
    monkeypatch.syspath_prepend(str(tmp_path))
    return Start(tmp_path)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, of_inductor: Path) -> Path:
    """What two starts leave in graphrt's cache."""
    directory = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(of_inductor))
        patch.syspath_prepend(str(directory))
        start = Start(directory)
        assert start() == COMPILED
        assert start() == LOADED
    return directory / "kept"


COMPILED, LOADED = (1, 0), (0, 1)
TAIL = "\n# An edit.\nLATER = 1\n"


@pytest.mark.parametrize(
    ("change", "given", "found"),
    [
        (lambda start, patch: None, {}, LOADED),
        (lambda start, patch: start.edit("untraced.py", UNTRACED + TAIL), {}, LOADED),
        (lambda start, patch: None, {"capture_sizes": [1, 2, 4]}, LOADED),
        (lambda start, patch: start.edit("traced.py", TRACED + TAIL), {}, LOADED),
        (lambda start, patch: start.edit("traced.py", TRACED.replace("3", "4")), {}, COMPILED),
        (lambda start, patch: patch.setattr(torch, "__version__", "9.9.9"), {}, COMPILED),
        (lambda start, patch: None, {"dynamic_shapes": "unbacked"}, COMPILED),
        (lambda start, patch: None, {"autotune": False}, COMPILED),
    ],
    ids=[
        "nothing",
        "untraced",
        "capture sizes",
        "a comment",
        "a number",
        "torch",
        "shapes",
        "autotune",
    ],
)
def test_only_changes_that_affect_code_miss_the_compile_cache(
    start: Start,
    kept: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Start, pytest.MonkeyPatch], None],
    given: dict[str, Any],
    found: tuple[int, int],
):
    shutil.copytree(kept, start.directory / "kept")
    change(start, monkeypatch)
    assert start(**given) == found
    assert start(**given) == LOADED


def test_with_the_cache_disabled_every_start_compiles(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GRAPHRT_DISABLE_COMPILE_CACHE", "1")
    assert start() == COMPILED
    assert start() == COMPILED
    assert not (start.directory / "kept").exists()
