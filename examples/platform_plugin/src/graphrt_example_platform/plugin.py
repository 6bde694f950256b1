"""The hook that graphrt finds through the entry point of this package."""

from __future__ import annotations

from graphrt.platforms import hookimpl
from graphrt_example_platform.platform import TracingCpuPlatform


@hookimpl
def graphrt_platforms() -> TracingCpuPlatform:
    """One instance; called once, when something first asks for a platform."""
    return TracingCpuPlatform()
