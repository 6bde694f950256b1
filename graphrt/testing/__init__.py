"""The conformance suite: what a platform must do, as pytest classes a plugin's author runs.

from graphrt.testing import PlatformConformance

class TestMyPlatform(PlatformConformance):
    platform = MyPlatform()

`ConformanceBase` has the suite's fixtures and steps alone, for tests of a device's own.
"""

from graphrt.testing.conformance.base import ConformanceBase, Counting
from graphrt.testing.conformance.suite import PlatformConformance

__all__ = ["ConformanceBase", "Counting", "PlatformConformance"]
