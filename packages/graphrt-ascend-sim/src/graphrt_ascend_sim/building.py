"""The simulator's libraries, built with g++ into a cache of the user's."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from graphrt.errors import PlatformError

SOURCES = Path(__file__).with_name("native")
DEVICE_LIBRARY, OPERATOR_LIBRARY = "libascendcl.so", "libopapi.so"
# The one without aclrtValueWait, and its folder in the cache: CANN's pages have it from 8.2.RC1 on.
OLD_CANN = "8.1.RC1"
# Those of CANN that the simulator says it is, the default last.
VERSIONS = (OLD_CANN, "8.3.RC1", "8.5.0")
# Linked by torch_npu too; what it looks for in them is in the device library.
_EMPTY_LIBRARIES = (
    "libacl_op_compiler.so",
    "libacl_tdt_channel.so",
    "libge_runner.so",
    "libgraph.so",
    "libhccl.so",
    "libnnopbase.so",
)
# Its functions are in the operator library.
_ATTENTION_LIBRARY = "libatb.so"
LIBRARIES = (DEVICE_LIBRARY, *_EMPTY_LIBRARIES, OPERATOR_LIBRARY, _ATTENTION_LIBRARY)
_LACKS = """
#include "errors.h"
#define WEAK extern "C" __attribute__((weak, visibility("default")))
#define LACKS(name)                                                                            \\
    WEAK int name##GetWorkspaceSize() {                                                        \\
        return sim::fail(sim::kNoOperator, "the simulator lacks the operator " #name);         \\
    }                                                                                          \\
    WEAK int name() { return sim::kNoOperator; }
"""
_FLAGS = ["-O1", "-fPIC", "-fvisibility=hidden"]


def compiler() -> str | None:
    """The C++ compiler (CXX, else g++), or None."""
    return shutil.which(os.environ.get("CXX") or "g++")


def is_built() -> bool:
    """Whether the cache has the libraries of these sources, torch and torch_npu."""
    return _complete(_directory())


def build() -> Path:
    """The directory with the libraries, which are built first if they are not there.

    Two processes never build at once. Raises `PlatformError` with the compiler's
    message if that fails.
    """
    target = _directory()
    if _complete(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_suffix(".lock")):
        if not _complete(target):
            work = Path(tempfile.mkdtemp(prefix="build-", dir=target.parent))
            try:
                _build_in(work)
                shutil.rmtree(target, ignore_errors=True)
                work.rename(target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return target


def _takes_options_back() -> bool:
    """Whether torch registers allocator options of CUDA by a name that torch_npu has too."""
    header = _package("torch") / "include/c10/core/AllocatorConfig.h"
    is_cuda = (_package("torch") / "lib/libc10_cuda.so").exists()
    return is_cuda and "getMutableKeys" in header.read_text(encoding="utf-8")


def _complete(directory: Path) -> bool:
    names = (*LIBRARIES, f"{OLD_CANN}/{DEVICE_LIBRARY}")
    return all((directory / name).is_file() for name in names)


def _directory() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    key = hashlib.sha256()
    for part in (version("torch"), version("torch_npu"), *_FLAGS, str(_package("torch"))):
        key.update(part.encode())
    sources = sorted(path for path in SOURCES.rglob("*") if path.is_file())
    for source in (*sources, Path(__file__)):
        key.update(source.name.encode() + source.read_bytes())
    return Path(cache) / "graphrt" / f"ascend-simulator-{key.hexdigest()[:16]}"


def _package(name: str) -> Path:
    found = find_spec(name)
    assert found is not None and found.origin is not None, f"{name} is installed"
    return Path(found.origin).parent


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_in(work: Path) -> None:
    torch = _package("torch")
    include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    missing = work / "missing.cpp"
    missing.write_text(_refusals(_package("torch_npu") / "lib" / "libtorch_npu.so"))
    # Only these are built on torch.
    operators = sorted((SOURCES / "operators").glob("*.cpp"))
    beside_cuda = SOURCES / "torch" / "allocator_options.cpp"
    on_torch = [*operators, *([beside_cuda] if _takes_options_back() else [])]
    device = [p for p in sorted(SOURCES.rglob("*.cpp")) if p not in (*operators, beside_cuda)]
    # The slow ones first.
    jobs = [["-std=c++20", *include, str(path)] for path in on_torch]
    jobs += [["-std=c++17", str(path)] for path in (*device, missing)]
    done = itertools.count(1)

    def compile_one(job: list[str]) -> None:
        _run(work, *_FLAGS, f"-I{SOURCES}", "-c", *job)
        sys.stderr.write(f"graphrt: building the simulator: {next(done)} of {len(jobs)} files\n")

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        list(threads.map(compile_one, jobs))

    def objects(paths: list[Path]) -> list[str]:
        return [f"{path.stem}.o" for path in paths]

    here = ["-L.", "-Wl,--no-as-needed", "-lascendcl", "-Wl,-rpath,$ORIGIN"]
    _link(work, DEVICE_LIBRARY, *objects(device), "-lpthread")
    (work / OLD_CANN).mkdir()
    older = [path for path in device if path.name != "values.cpp"]
    _link(work, f"{OLD_CANN}/{DEVICE_LIBRARY}", *objects(older), "-lpthread")
    for name in _EMPTY_LIBRARIES:
        _link(work, name, *here)
    if _takes_options_back():
        options = [*objects([beside_cuda]), f"-L{torch / 'lib'}", "-lc10"]
        _link(work, "libhccl.so", *options, *here)
    libraries = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    _link(work, OPERATOR_LIBRARY, *objects([*operators, missing]), *here, *libraries)
    _link(work, _ATTENTION_LIBRARY, *here, "-lopapi")


def _refusals(wheel: Path) -> str:
    """Source of the operators that torch_npu may call and the simulator lacks.

    They are weak, so that those that it has go before them. Without them torch_npu would fall back
    to other operators, and the error would not name the function.
    """
    names = sorted(set(re.findall(rb"\b(aclnn\w+)GetWorkspaceSize\0", wheel.read_bytes())))
    refused = [f"LACKS({name.decode()})" for name in names]
    return "\n".join([_LACKS, *refused, ""])


def _link(work: Path, name: str, *arguments: str) -> None:
    _run(work, "-shared", "-o", name, f"-Wl,-soname,{Path(name).name}", *arguments)


def _run(work: Path, *arguments: str) -> None:
    command = [compiler() or "g++", *arguments]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PlatformError(
            "the Ascend simulator could not be built",
            got=f"{shlex.join(command)}\n{done.stderr.strip()}",
            expected="a g++ of version 10 or later, with C++20",
            advice="set CXX to another compiler",
        )
