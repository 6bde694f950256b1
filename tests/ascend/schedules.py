"""Running tests again under other schedules, and other limits, of the simulated device."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

SCHEDULES = ("lazy", *(f"random:{seed}" for seed in range(1, 21)), "lazy-random:3")
"""Beside "eager", which is what the tests run under anyway."""


def variables(
    schedule: str = "eager", streams: int | None = None, hang_ms: int = 20_000
) -> dict[str, str]:
    """The environment that gives the simulated device these settings."""
    environment = {"GRAPHRT_SIM_SCHEDULE": schedule, "GRAPHRT_SIM_HANG_MS": str(hang_ms)}
    if streams is not None:
        environment["GRAPHRT_SIM_STREAMS"] = str(streams)
    return environment


def is_simulated() -> bool:
    """Whether the NPU here is one that takes these settings."""
    try:
        library = ctypes.CDLL("libascendcl.so")
    except OSError:
        return False
    return hasattr(library, "graphrt_sim_set_schedule")


def need_simulator() -> None:
    if not is_simulated():
        pytest.skip("needs a simulated NPU, whose limits and schedule can be chosen")


@contextmanager
def scheduled(schedule: str) -> Iterator[None]:
    """The device of this process picks its tasks so, and eagerly again afterwards."""
    import graphrt_ascend_sim as simulator

    simulator.set_schedule(schedule)
    try:
        yield
    finally:
        # What is left over would be done under the other one.
        torch.npu.synchronize()
        simulator.set_schedule("eager")


def python(
    code: str,
    *,
    timeout_s: float = 300,
    environment: Mapping[str, str] | None = None,
    **settings: Any,
) -> str:
    """What `code` prints in a process of its own on a device with these settings."""
    # The simulator may crash when the process unloads it, which says nothing about the code.
    leave = "import os, sys; sys.stdout.flush(); sys.stderr.flush(); os._exit(0)"
    wanted = os.environ.get("GRAPHRT_PLATFORM", "ascend")
    started = f"import graphrt; graphrt.get_platform({wanted!r})"
    ended = f"{started}\nimport torch, torch_npu\n{code}\n{leave}"
    paths = [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", ended],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            **variables(**settings),
            **(environment or {}),
        },
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
