"""A second start compiles and tunes nothing, counted in a process with empty compiler caches."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from graphrt.compile import CompileOptions, compile_module
from graphrt.compile.backend import process
from graphrt.compile.cache.store import CompileCacheWarning
from graphrt.compile.pieces.cached import CachedPieces

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="Inductor on the CPU needs g++"
)
FORMATS = ("binary", "unpacked")
# Of each size, the first and the last piece, and one for all layers between them. g++ takes seconds
# for each.
# Layers of a Llama, or 0 for one product, and the pieces that they are compiled to.
SMALL, ONE_LAYER, SIXTEEN_LAYERS = (0, 2), (1, 4), (16, 6)
COMPILERS = {"g++", "gcc", "c++", "cc", "clang", "clang++", "nvcc", "ptxas"}
ROOT = Path(__file__).parents[2]


# In a process of its own ----------------------------------------------------------------------


def counted() -> tuple[Counter[str], list[list[str]]]:
    """Calls of all that compiles or tunes from now on, and the programs that are started."""
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.cpp_builder import CppBuilder
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    calls: Counter[str] = Counter()
    programs: list[list[str]] = []

    def count(owner: Any, name: str, what: str) -> None:
        function = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            calls[what] += 1
            return function(*args, **kwargs)

        setattr(owner, name, counting)

    def seen(event: str, args: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            programs.append([str(each) for each in args[1]])

    count(GraphLowering, "__init__", "graphs lowered")
    count(CppBuilder, "build", "libraries built")
    count(AlgorithmSelectorCache, "__call__", "algorithms selected")
    count(CachingAutotuner, "benchmark_all_configs", "kernels tuned")
    # What calls it is called for kernels that are not tuned, too.
    count(CachingAutotuner, "_coordinate_descent_tuning", "kernels tuned further")
    count(FxGraphCache, "_save_graph", "graphs saved")
    if importlib.util.find_spec("triton") is not None:
        from triton.compiler.compiler import ASTSource

        # Not called for what Triton finds in its cache.
        count(ASTSource, "make_ir", "kernels compiled")
    sys.addaudithook(seen)
    return calls, programs


def compiles(program: list[str]) -> bool:
    """Whether it is a compiler at work; Triton's driver and launchers are no code of a piece."""
    name = Path(program[0]).name
    return name in COMPILERS and "--version" not in program and "-Wno-psabi" not in program


def start(request: dict[str, Any]) -> dict[str, Any]:
    """Compile the layers or load them, and call them at a general and a static size."""
    from tests.models.llama import Llama, step_inputs

    device, layers = request["device"], request["layers"]
    calls, programs = counted()
    torch.manual_seed(0)
    options = CompileOptions(
        backend="inductor",
        cache_dir=request["cache"],
        save_format=request["save_format"],
        compile_sizes=(4,),
    )
    if layers:
        compiled = compile_module(Llama(layers=layers).to(device), options=options)
    else:
        product = torch.nn.Linear(8, 8).to(device)
        compiled = compile_module(lambda x: product(x).relu(), ["x"], options=options)
    results = []
    for size in (3, 4):
        inputs = step_inputs(size) if layers else {"x": torch.randn(size, 8)}
        inputs = {name: each.to(device) for name, each in inputs.items()}
        results.append(compiled(**inputs).tolist())
    figures = compiled.figures
    return {
        "backend": figures.backend,
        "compilations": figures.compilations,
        "loads": figures.loads,
        "calls": calls,
        "compilers": [each for each in programs if compiles(each)],
        "results": results,
    }


# Tests ----------------------------------------------------------------------------------------


def started(
    directory: Path, save_format: str, device: str, layers: int, **environment: str
) -> dict[str, Any]:
    """What `start` tells of a new process, whose compilers have cached nothing."""
    compilers = directory / "compilers"
    shutil.rmtree(compilers, ignore_errors=True)
    arguments = {
        "cache": str(directory / "kept"),
        "save_format": save_format,
        "device": device,
        "layers": layers,
    }
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(arguments)],
        cwd=Path(__file__).parent,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TORCHINDUCTOR_CACHE_DIR": str(compilers / "inductor"),
            "TRITON_CACHE_DIR": str(compilers / "triton"),
            # What is built is built in the process that counts.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TRITON_INTERPRET": "0",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert "CompileCacheWarning" not in done.stderr
    return record


def check_starts(
    tmp_path: Path, save_format: str, device: str, model: tuple[int, int], **environment: str
) -> Counter[str]:
    """The second of two starts loads what the first one made; what that one did is returned."""
    layers, pieces = model
    cold = started(tmp_path / "here", save_format, device, layers)
    assert (cold["backend"], cold["compilations"], cold["loads"]) == ("inductor", pieces, 0)
    assert cold["calls"]["graphs lowered"] >= pieces
    shutil.move(tmp_path / "here", tmp_path / "there")
    warm = started(tmp_path / "there", save_format, device, layers, **environment)
    assert warm["calls"] == {} and warm["compilers"] == []
    assert (warm["backend"], warm["compilations"], warm["loads"]) == ("inductor", 0, pieces)
    assert warm["results"] == cold["results"]
    return Counter(cold["calls"])


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize(
    ("save_format", "model"),
    [
        ("binary", ONE_LAYER),
        ("unpacked", SMALL),
    ],
)
def test_a_second_start_works_without_a_cpp_compiler(
    tmp_path: Path, save_format: str, model: tuple[int, int]
):
    calls = check_starts(tmp_path, save_format, "cpu", model, PATH=str(tmp_path))
    assert calls["libraries built"] and calls["algorithms selected"]


@pytest.mark.cuda
@pytest.mark.parametrize("save_format", FORMATS)
def test_a_second_start_compiles_and_tunes_nothing_on_a_gpu(tmp_path: Path, save_format: str):
    calls = check_starts(tmp_path, save_format, "cuda", SIXTEEN_LAYERS)
    assert calls["kernels compiled"] and calls["kernels tuned further"]


def forward(x):
    return (x * 3).relu()


def forward_of_removed_libraries(x):
    return (x * 5).relu()


def compiled_in(directory: Path, function: Callable[..., Any] = forward) -> Any:
    options = CompileOptions(backend="inductor", cache_dir=str(directory))
    compiled = compile_module(function, ["x"], options=options)
    compiled.ensure_compiled(torch.randn(3, 4))
    return compiled


def libraries(directory: Path) -> list[str]:
    """The C++ libraries in the only piece of a cache."""
    with zipfile.ZipFile(piece(directory)) as archive:
        return sorted(each for each in archive.namelist() if each.startswith("libraries/"))


def piece(directory: Path) -> Path:
    (path,) = directory.rglob("*.piece")
    return path


@pytest.fixture
def inductor_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from torch._inductor import codecache

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    # torch 2.11 loads a library of another test again from a directory that is gone.
    for each in (codecache.CppCodeCache, codecache.CppPythonBindingsCodeCache):
        monkeypatch.setattr(each, "cache", {})
    return tmp_path / "inductor"


@pytest.mark.long
@needs_compiler
def test_libraries_that_inductor_had_built_before_are_stored_in_the_cache(
    tmp_path: Path, inductor_directory: Path
):
    for name in ("first", "second"):
        compiled = compiled_in(tmp_path / name)
        assert compiled.figures.compilations == 1
    kept = [libraries(tmp_path / name) for name in ("first", "second")]
    assert len(kept[0]) == 1 and kept[0] == kept[1]


@needs_compiler
def test_a_damaged_library_is_never_loaded(tmp_path: Path, inductor_directory: Path):
    compiled_in(tmp_path / "kept")
    kept = piece(tmp_path / "kept")
    content = bytearray(kept.read_bytes())
    content[content.index(b"\x7fELF") + 4096] ^= 1
    kept.write_bytes(content)
    with pytest.warns(CompileCacheWarning, match="checksum"):
        again = compiled_in(tmp_path / "kept")
    assert (again.figures.compilations, again.figures.loads) == (1, 0)
    assert torch.equal(again(torch.ones(2, 4)), torch.full((2, 4), 3.0))


@needs_compiler
def test_loading_a_piece_writes_nothing_into_directories_of_inductor(
    tmp_path: Path, inductor_directory: Path, monkeypatch: pytest.MonkeyPatch
):
    # With code of its own: torch 2.11 gives other tests libraries that the process has loaded.
    compiled_in(tmp_path / "kept", forward_of_removed_libraries)
    shutil.rmtree(inductor_directory)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    before = dict(os.environ)
    assert compiled_in(tmp_path / "kept", forward_of_removed_libraries).figures.loads == 1
    after = {name: value for name, value in os.environ.items() if not name.startswith("_")}
    assert after == {name: value for name, value in before.items() if not name.startswith("_")}
    assert not [path for path in inductor_directory.rglob("*") if path.is_file()]


@needs_compiler
def test_code_that_inductor_cannot_load_is_compiled_again(
    tmp_path: Path, inductor_directory: Path, monkeypatch: pytest.MonkeyPatch
):
    from torch._inductor import codecache

    compiled_in(tmp_path / "kept")
    before = str(tmp_path / "other")
    # In the same directory torch 2.11 would not load the library again that it has loaded once.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", before)
    monkeypatch.setattr(codecache.CppPythonBindingsCodeCache, "cache", {})
    load_async: Callable[..., Any] = codecache.CppCodeCache.load_async.__func__

    def no_library(path: str, key: str) -> Any:
        raise OSError("no such library")

    with monkeypatch.context() as patched:
        patched.setattr(codecache.CppPythonBindingsCodeCache, "_load_library", no_library)
        with pytest.warns(CompileCacheWarning), pytest.raises(Exception, match="no such library"):
            compiled_in(tmp_path / "kept")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == before
    assert codecache.CppCodeCache.load_async.__func__ is load_async


@pytest.mark.long
@needs_compiler
def test_an_error_of_the_temporary_directory_rejects_no_cached_piece(
    tmp_path: Path, inductor_directory: Path, monkeypatch: pytest.MonkeyPatch
):
    compiled_in(tmp_path)
    shutil.rmtree(Path(process.new_directory()).parent)
    assert compiled_in(tmp_path).figures.loads == 1
    with monkeypatch.context() as patched:
        patched.setattr("tempfile.mkdtemp", Mock(side_effect=OSError("no space left")))
        with pytest.warns(CompileCacheWarning, match=r"is not loaded.*no space left"):
            assert CachedPieces.load(Mock(), "piece", 1) is None
    assert compiled_in(tmp_path).figures.loads == 1


@needs_compiler
def test_a_damaged_piece_runs_eagerly_without_a_cpp_compiler(
    tmp_path: Path, inductor_directory: Path, monkeypatch: pytest.MonkeyPatch
):
    compiled_in(tmp_path)
    piece(tmp_path).write_bytes(b"")
    none = Mock(side_effect=RuntimeError("No working C++ compiler found"))
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none)
    with pytest.warns(CompileCacheWarning):
        again = compiled_in(tmp_path)
    assert "No working C++ compiler" in again.figures.backend_reason
    assert torch.equal(again(torch.ones(2, 4)), torch.full((2, 4), 3.0))
    assert not piece(tmp_path).read_bytes()


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_has_its_own_compile_lock_and_directory():
    parents = Path(process.new_directory()).parent
    # A thread that is another one than forks.
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as held:
        pool.submit(held.enter_context, process.compiling()).result()
        if (child := os.fork()) == 0:
            signal.alarm(10)  # ends a child that waits for a lock which nobody releases
            with contextlib.suppress(BaseException):
                own = Path(process.new_directory()).parent
                os._exit(0 if own != parents and shutil.rmtree(own) is None else 1)
            os._exit(2)
        _, status = os.waitpid(child, 0)
        pool.submit(held.close).result()
    assert status == 0


if __name__ == "__main__":
    print(json.dumps(start(json.loads(sys.argv[1]))))
