"""Tests for a device are collected everywhere and skipped, with the reason, where it is missing."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import torch
from _pytest.assertion import util

from graphrt.core.base._native_door import VARIABLE, native_state
from graphrt.core.base.errors import PlatformError
from graphrt.core.device.registry import PLATFORM_VARIABLE, get_platform
from graphrt.core.replay import recording
from tests import wheels

SIMULATOR = "ascend-sim"
NPU = "an Ascend NPU, or graphrt-ascend-sim and GRAPHRT_PLATFORM=ascend-sim (make test-ascend)"

if importlib.util.find_spec("hypothesis") is not None:
    import hypothesis

    # A deadline per example only measures how busy the machine is.
    hypothesis.settings.register_profile("graphrt", deadline=None)
    hypothesis.settings.load_profile("graphrt")


if torch.cuda.device_count() == 0:
    # Read when kernels are defined: without a GPU they run in Triton's interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


ONLY_ON_NPUS = ("npu", "long and npu")
"""What `make test-ascend` and `make test-ascend-long` ask for: most files need not be imported."""

ABSENT = [
    name
    for name in ("hypothesis", "safetensors", "tokenizers", "rich", "typer")
    if importlib.util.find_spec(name) is None
]
"""Test dependencies that a bare GPU machine may lack."""


def _missing_packages(path: Path) -> list[str]:
    """Absent packages that this file imports."""
    text = path.read_text(encoding="utf-8") if ABSENT else ""
    return [name for name in ABSENT if f"import {name}" in text or f"from {name}" in text]


def pytest_configure() -> None:
    wanted = os.environ.get("GRAPHRT_TORCH", "")
    if wanted and torch.__version__.split("+")[0] != wanted:
        raise pytest.UsageError(
            f"these tests are for torch {wanted} (GRAPHRT_TORCH); imported was {torch.__version__} "
            f"from {Path(torch.__file__).parent}; see ci/run_row.sh"
        )
    if os.environ.get(VARIABLE) == "1" and native_state != "in use":
        raise pytest.UsageError(f"{VARIABLE}=1 asks for graphrt's C part, but {native_state}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.suffix != ".py":
        return None
    if _missing_packages(collection_path) or (
        config.option.markexpr in ONLY_ON_NPUS
        and not re.search(r"\bnpu\b", collection_path.read_text(encoding="utf-8"))
    ):
        return True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without garbage collections: ten of them would look at 700,000 objects, all of which stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


class _Hidden(threading.local):
    """pytest's comparison in an `assert`; no walk through Python objects looks into a thread's."""

    compare: Callable[..., str | None] | None = None

    def __call__(self, *args: object) -> str | None:
        return None if self.compare is None else self.compare(*args)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """An `assert` asks globals of pytest's how to compare, and how much to print. By them a forward
    that reaches an `assert` reaches all 14,000 tests, as state that each run saves and compares.
    """
    hidden, config = _Hidden(), util._config
    hidden.compare, util._reprcompare, util._config = util._reprcompare, hidden, None
    try:
        return (yield)
    finally:
        util._reprcompare, util._config = hidden.compare, config


@pytest.fixture(scope="module")
def frozen_heap() -> Iterator[None]:
    """What other tests have left is not walked through at each collection of these."""
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "_frozen_by_host", True)  # to ask takes 7 ms
        yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _heap_frozen_by_nobody() -> Iterator[None]:
    """What a test says of a frozen heap is not said to the next one."""
    was = recording._frozen_by_host
    yield
    recording._frozen_by_host = was


def pytest_report_header(start_path: Path) -> list[str]:
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    left_out = {file: _missing_packages(file) for file in files}
    return [
        f"not collected: {file.name}, needs {', '.join(missing)}"
        for file, missing in left_out.items()
        if missing
    ]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """graphrt's wheel, built of this checkout."""
    return wheels.build(tmp_path_factory.mktemp("wheel"))


def _why_missing(device: str, platform: str) -> str | None:
    availability = get_platform(platform, must_be_available=False).availability()
    return None if availability.available else f"needs {device}: {availability.reason}"


def _why_no_npu() -> str | None:
    if os.environ.get(PLATFORM_VARIABLE) != SIMULATOR:
        return _why_missing(NPU, "ascend")
    try:
        get_platform(SIMULATOR)
    except PlatformError as error:
        # Not skipped: who asked for it by name wants to know.
        how = "pip install ./packages/graphrt-ascend-sim, or make test-ascend"
        raise pytest.UsageError(f"{error}\n  the simulator: {how}") from error
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "long" not in config.option.markexpr:
        long = {item for item in items if item.get_closest_marker("long") is not None}
        config.hook.pytest_deselected(items=[*long])
        items[:] = [item for item in items if item not in long]
    missing = {"cuda": _why_missing("an NVIDIA GPU", "cuda"), "npu": _why_no_npu()}
    for item in items:
        for marker, reason in missing.items():
            if reason is not None and item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
