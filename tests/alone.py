"""Tests of figures that other processes change, as the free memory of a device."""

from __future__ import annotations

import os

import pytest

IS_ALONE = "PYTEST_XDIST_WORKER" not in os.environ
"""Whether no other pytest of this run uses the device."""


def skip_beside_others() -> None:
    """Skip this test if other processes use the device meanwhile."""
    if not IS_ALONE:
        pytest.skip(
            "measures the device's free memory, which other tests use meanwhile: without -n"
        )
