"""Every platform of this repository against the conformance suite."""

from __future__ import annotations

import pytest

from graphrt.core.plugins import get_platform
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
    platform = get_platform("ascend", must_be_available=False)
