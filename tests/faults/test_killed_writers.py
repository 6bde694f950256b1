"""A process that is killed while it writes a plan or a cache entry leaves files that load."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from graphrt import Plan
from graphrt.compile.cache.entry import CacheEntry
from tests.compile.test_cache_crash import content, key_of, remove_all, write
from tests.draws import MORE

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")

KILLS = 10 * MORE


def kill_while(write_once: Callable[[], None], after_s: float) -> None:
    """Kill a process that writes again and again, so many seconds after its first file."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, b"writing")
            while True:
                write_once()
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(reader, 7) == b"writing"
    os.close(reader)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the writer ended by itself"


@pytest.mark.draws
def test_a_killed_plan_writer_leaves_the_old_or_the_new_plan(tmp_path: Path):
    target = tmp_path / "plan.json"
    plans = [Plan(mode="FULL", sizes=[1, 2]), Plan(mode="FULL", sizes=list(range(1, 200)))]
    plans[0].save(target)
    rng = random.Random(0)
    counts = set()
    for _ in range(KILLS):
        kill_while(lambda: [plan.save(target) for plan in plans], rng.uniform(0.0, 0.02))
        counts.add(len(Plan.load(target).as_dict()["arguments"]["sizes"]))
    assert counts == {2, 199}


@pytest.mark.draws
def test_a_killed_cache_writer_leaves_a_whole_entry_or_a_miss(tmp_path: Path):
    directory = tmp_path / "cache"

    def write_and_remove() -> None:
        write(directory)
        remove_all(directory)

    rng = random.Random(0)
    for _ in range(KILLS):
        kill_while(write_and_remove, rng.uniform(0.0, 0.03))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            content(CacheEntry(key_of(), directory))  # each piece is whole or not there
