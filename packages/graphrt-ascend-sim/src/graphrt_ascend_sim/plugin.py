"""The hook that graphrt finds through the entry point of this distribution."""

from __future__ import annotations

from graphrt.platforms import hookimpl
from graphrt_ascend_sim.platform import SimulatedAscendPlatform


@hookimpl
def graphrt_platforms() -> SimulatedAscendPlatform:
    """One instance; nothing is built, and torch_npu not imported, before a host is given it."""
    return SimulatedAscendPlatform()
