"""A torch_npu that cannot be imported is explained; needs no NPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from graphrt.ascend.driver import library
from graphrt.cli.app import app
from graphrt.core.device import registry as plugins
from tests import starts

ROOT = Path(__file__).resolve().parents[2]
NO_CANN = "libhccl.so: cannot open shared object file: No such file or directory"
NO_DRIVER = "libascend_hal.so: cannot open shared object file: No such file or directory"


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes `import torch_npu` end in an error, or give a module."""

    def importing(outcome: object) -> None:
        def load(name: str) -> object:
            assert name == "torch_npu"
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(library, "torch_npu", lambda: load("torch_npu"))

    return importing


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ImportError(NO_CANN), ["libhccl.so", "set_env.sh", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"]),
        (ImportError("libge_runner.so.1: cannot open shared object file"), ["CANN"]),
        (ImportError(NO_DRIVER), ["driver", "container"]),
        (ImportError("libc10.so: cannot open shared object file"), ["another torch"]),
        (ImportError("libtorch_npu.so: undefined symbol: _ZN3c10"), ["another torch", "version"]),
        (ModuleNotFoundError("No module named 'yaml'", name="yaml"), ["pip install pyyaml"]),
        (RuntimeError("driver says no\nmore"), ["driver says no"]),
        (RuntimeError(), ["RuntimeError"]),
    ],
)
def test_availability_says_why_torch_npu_cannot_be_imported(
    error: Exception, says: list[str], imports: Any
) -> None:
    imports(error)
    availability = library.availability()
    assert not availability.available
    assert "torch_npu cannot be imported" in availability.reason
    assert all(part in availability.reason for part in says), availability.reason
    assert "\n" not in availability.reason


@pytest.mark.parametrize(("count", "available"), [(0, False), (2, True)])
def test_the_platform_is_available_only_if_torch_npu_finds_a_device(
    count: int, available: bool, imports: Any
) -> None:
    imports(SimpleNamespace(npu=SimpleNamespace(device_count=lambda: count)))
    assert library.availability().available is available


def test_availability_survives_a_torch_npu_with_a_broken_spec(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(name: str) -> None:
        raise ValueError("torch_npu.__spec__ is None")

    monkeypatch.setattr(library.importlib.util, "find_spec", broken)
    assert "__spec__" in library.availability().reason


def test_the_number_of_free_streams_is_unknown_without_cann(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(name: str) -> object:
        raise OSError(NO_CANN)

    monkeypatch.setattr(library.ctypes, "CDLL", load)
    assert library.available_streams() is None


@pytest.mark.parametrize(("code", "free"), [(0, 1950), (107000, None)])
def test_the_number_of_free_streams_is_read_from_cann(
    code: int, free: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(count: Any) -> int:
        count._obj.value = 1950
        return code

    cann = SimpleNamespace(aclrtGetStreamAvailableNum=ask)
    monkeypatch.setattr(library.ctypes, "CDLL", lambda name: cann)
    assert library.available_streams() == free


def test_environment_variables_that_break_graphs_give_a_note() -> None:
    bad = {"ASCEND_LAUNCH_BLOCKING": "1", "TASK_QUEUE_ENABLE": "2"}
    notes = library.environment_notes(bad)
    assert [name in note for name, note in zip(bad, notes, strict=True)] == [True, True]
    assert library.environment_notes({"TASK_QUEUE_ENABLE": "1"}) == ()


def test_doctor_says_that_cann_is_missing(imports: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_default", plugins.PlatformRegistry(group=None))
    imports(ImportError(NO_CANN))
    result = CliRunner().invoke(app, ["doctor", "--json"], catch_exceptions=False)
    platforms = {each["name"]: each for each in json.loads(result.output)["platforms"]}
    assert "set_env.sh" in platforms["ascend"]["reason"]
    text = CliRunner().invoke(app, ["doctor"], catch_exceptions=False).output
    assert "set_env.sh" in text.replace("\n", "")


@pytest.fixture
def broken_extension(tmp_path: Path) -> dict[str, str]:
    """An environment in which torch finds a torch_npu without CANN."""
    (tmp_path / "torch_npu.py").write_text(f"raise ImportError({NO_CANN!r})\n")
    info = tmp_path / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:autoload\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environ = {**os.environ, "PYTHONPATH": path}
    for name in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "GRAPHRT_PLATFORM"):
        environ.pop(name, None)
    return environ


RUN = "import sys; from graphrt.cli.app import main; sys.argv = ['graphrt', 'doctor']; main()"


def test_doctor_runs_beside_a_broken_torch_npu(broken_extension: dict[str, str]) -> None:
    environ = {**broken_extension, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "COLUMNS": "200"}
    done = starts.run("-c", RUN, env=environ)
    assert done.returncode == 0, done.stderr
    assert "libhccl.so" in done.stdout and "set_env.sh" in done.stdout
    assert "2.13.0" in done.stdout
