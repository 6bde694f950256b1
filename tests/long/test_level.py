"""The rule for rising figures finds leaks, and accepts figures that merely vary."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.long import level
from tests.long.level import OBJECTS_BESIDES, Figures, is_level, rise

pytestmark = pytest.mark.usefixtures("frozen_heap")

STEPS = range(0, 60_000, 1000)


class Left:
    """An object that is left over."""

    def __init__(self) -> None:
        self.more: list[Any] = []


def test_a_steadily_rising_figure_is_reported_as_rising():
    assert not is_level(STEPS, [1000 + step // 100 for step in STEPS], 0)
    assert round(rise(STEPS, [1000 + step // 100 for step in STEPS])) == 390


def test_a_rise_in_the_first_third_counts_as_warm_up():
    assert is_level(STEPS, [min(step, 19_000) for step in STEPS], 0)


def test_a_large_jump_in_the_last_third_is_reported_as_rising():
    assert not is_level(STEPS, [1000] * 40 + [1030] * 20, 0)
    assert is_level(STEPS, [1000] * 40 + [1010] * 20, 0)


def test_varying_and_falling_figures_are_not_reported_as_rising():
    number = random.Random(0)
    assert is_level(STEPS, [10_000 + number.randint(-300, 300) for _ in STEPS], 0)
    assert is_level(STEPS, [10_000 - step // 10 for step in STEPS], 0)


def test_a_single_leaked_file_descriptor_is_reported_as_rising():
    assert not is_level(STEPS, [6] * 40 + [7] * 20, level.BESIDES["fds"])


def sampled(each_step: Any) -> Figures:
    figures = Figures("cpu")
    for step in range(6):
        each_step()
        figures.sample(step, 0)
    return figures


def test_leaked_python_objects_are_named_by_their_type():
    kept: list[Left] = []
    figures = sampled(lambda: kept.extend(Left() for _ in range(OBJECTS_BESIDES)))
    assert any("test_level.Left" in each for each in figures.not_level())


def test_temporary_python_objects_are_not_reported_as_leaked():
    figures = sampled(lambda: [Left() for _ in range(OBJECTS_BESIDES)])
    assert not any("Left" in each for each in figures.not_level())


def test_the_table_of_samples_shows_each_figure():
    rows = sampled(lambda: None).rows()
    assert {"arena", "threads", "tensors", "objects"} <= {row.split()[0] for row in rows[1:]}
