"""The conformance suite: what a platform must do, as pytest classes a plugin's author runs.

from graphrt.testing import PlatformConformance

class TestMyPlatform(PlatformConformance):
    platform = MyPlatform()
"""

from graphrt.testing.conformance import PlatformConformance

__all__ = ["PlatformConformance"]
