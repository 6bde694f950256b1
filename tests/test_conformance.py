"""Every platform of this repository against the conformance suite."""

from __future__ import annotations

import os

import pytest

from graphrt.core.device.registry import PLATFORM_VARIABLE, get_platform
from graphrt.testing import PlatformConformance


class TestCpu(PlatformConformance):
    platform = get_platform("cpu")


@pytest.mark.cuda
class TestCuda(PlatformConformance):
    platform = get_platform("cuda", must_be_available=False)


class TestAccelerator(PlatformConformance):
    """Skipped, with the reason, where no device registers graphs with torch."""

    platform = get_platform("accelerator", must_be_available=False)


@pytest.mark.npu
class TestAscend(PlatformConformance):
    """On a real NPU, or on the simulator if GRAPHRT_PLATFORM names it."""

    forced = os.environ.get(PLATFORM_VARIABLE)
    name = "ascend-sim" if forced == "ascend-sim" else "ascend"
    platform = get_platform(name, must_be_available=False)
