"""Tests of figures that other processes change: the free memory of a device, and times."""

from __future__ import annotations

import os

import pytest

IS_ALONE = "PYTEST_XDIST_WORKER" not in os.environ
"""Whether no other pytest of this run uses the device."""


def skip_beside_others(figure: str = "the device's free memory") -> None:
    """Skip this test of a figure if other processes use the device meanwhile."""
    if not IS_ALONE:
        pytest.skip(f"measures {figure}, which other tests change meanwhile: without -n")
