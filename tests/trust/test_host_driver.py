"""Random changes of everything that real models hold, beside an eager twin: see host_driver.py."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphrt.core.base._native_door import NativeWatch, native_state
from tests.trust.host_driver import Driver, models_of
from tests.trust.host_programs import all_ids_taken

ROOT = Path(__file__).resolve().parents[2]
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
needs_transformers = pytest.mark.skipif(
    not HAS_TRANSFORMERS, reason="transformers is not installed: no models to change"
)


def drive(models: list[str], changes: int, *, seed: int, taken: bool = False) -> Driver:
    driver = Driver(seed, models_of(models))
    programs = itertools.count()
    with all_ids_taken() if taken else contextlib.nullcontext():
        # The slots of a model, and so what a seed draws, depend on the tests before.
        for at_least in range(changes, 6 * changes, changes):
            driver.run(at_least, programs)
            outcomes = driver.summary()["outcomes"]
            if "quarantine" in outcomes:
                break
    assert driver.wrong == [], driver.wrong
    assert "quarantine" in outcomes, "nothing made a difference"
    assert sum(outcomes.values()) == driver.counts["changes"] >= changes
    return driver


def test_a_small_net_under_random_changes_is_right() -> None:
    driver = drive(["net"], 30, seed=1)
    assert driver.counts["slots"] > 200
    if NativeWatch is not None:
        assert driver.counts["told"], driver.counts


@needs_transformers
def test_a_llama_model_under_random_changes_is_right() -> None:
    drive(["llama"], 10, seed=2)


@pytest.mark.skipif(NativeWatch is None, reason=f"no dict is watched: {native_state}")
def test_with_all_dict_watchers_taken_changes_to_a_small_net_are_found_in_time() -> None:
    assert drive(["net"], 15, seed=3, taken=True).counts["told"] == 0


@needs_transformers
@pytest.mark.long
@pytest.mark.parametrize("how", ["", "taken", "without C"])
@pytest.mark.parametrize("seed", range(4))
def test_many_model_families_are_right_under_thousands_of_random_changes(
    seed: int, how: str
) -> None:
    command = [sys.executable, "-m", "tests.trust.host_driver", "--changes", "1000"]
    command += ["--seed", str(seed), *(["--taken"] if how == "taken" else [])]
    switch = {"GRAPHRT_NATIVE": "0"} if how == "without C" else {}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **switch},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
