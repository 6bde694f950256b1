"""The compiled copy of inputs, which is built where one asks for it: it does what Python does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE = "graphrt.core.inputs.transfer._gather"
SAME_TESTS = ("test_alike.py", "test_input_ring.py", "test_slots.py")

# Loads the build before graphrt looks for it, and says at the end whether it was used.
PLUGIN = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location({MODULE!r}, sys.argv[-1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
calls, gather = [0], module.gather

def counted(*arguments):
    calls[0] += 1
    return gather(*arguments)

module.gather = counted
sys.modules[{MODULE!r}] = module
import pytest
code = pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:-1]])
print("calls:", calls[0])
raise SystemExit(code)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The extension, built as an installation that asks for it builds it."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if shutil.which(compiler) is None or not header.exists():
        pytest.skip(f"needs a C compiler ({compiler}) and Python's headers ({header})")
    folder = tmp_path_factory.mktemp("native")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "native", folder / "native")
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "built"],
        cwd=folder,
        env=os.environ | {"GRAPHRT_NATIVE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (found,) = (folder / "built").rglob("_gather*")
    return found


def test_the_tests_of_fetched_inputs_pass_with_it(built: Path) -> None:
    tests = [str(ROOT / "tests" / "core" / name) for name in SAME_TESTS]
    done = subprocess.run(
        [sys.executable, "-c", PLUGIN, *tests, str(built)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.rpartition("calls:")[2]) > 1000


def test_wrong_calls_raise_and_copy_nothing(built: Path) -> None:
    script = f"""
import importlib.util, torch
spec = importlib.util.spec_from_file_location({MODULE!r}, {str(built)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
into, x = torch.zeros(4, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
part = (8).to_bytes(8, "little") + (16).to_bytes(8, "little")
yes, no, at = (lambda *_: True), (lambda *_: False), torch.Tensor.data_ptr

def fails(error, *arguments):
    try:
        module.gather(*arguments)
    except error:
        return
    raise AssertionError(arguments)

fails(TypeError, yes, at, [x], part, into.data_ptr())
fails(TypeError, yes, at, (x,))
fails(TypeError, yes, at, (3,), part, into.data_ptr())
fails(ValueError, yes, at, (x, x), part, into.data_ptr())
fails(ValueError, yes, at, (x,) * 300, part * 300, into.data_ptr())
fails(ZeroDivisionError, lambda *_: 1 / 0, at, (x,), part, into.data_ptr())
fails(OverflowError, yes, at, (x,), part, -1)
assert not module.gather(no, at, (x,), part, into.data_ptr())
gone = torch.ones(2, dtype=torch.int64)
gone.untyped_storage().resize_(0)
assert not module.gather(yes, at, (x, gone), part * 2, into.data_ptr())
assert into.tolist() == [0, 0, 0, 0]
assert module.gather(yes, at, (x,), part, into.data_ptr())
assert into.tolist() == [0, 1, 1, 0]
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_it_is_not_built_unless_it_is_asked_for(tmp_path: Path) -> None:
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "GRAPHRT_NATIVE"}
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "built"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("_gather*"))
