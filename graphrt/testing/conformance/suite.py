"""One class with every conformance test; a platform's author subclasses it."""

from __future__ import annotations

from graphrt.testing.conformance.breaks import BreakConformance
from graphrt.testing.conformance.capture import CaptureConformance
from graphrt.testing.conformance.constants import ConstantConformance
from graphrt.testing.conformance.failures import FailureConformance
from graphrt.testing.conformance.lifetimes import LifetimeConformance
from graphrt.testing.conformance.pools import PoolConformance
from graphrt.testing.conformance.runner import RunnerConformance
from graphrt.testing.conformance.side_doors import SideDoorConformance
from graphrt.testing.conformance.tasks import TaskConformance


class PlatformConformance(
    CaptureConformance,
    BreakConformance,
    ConstantConformance,
    SideDoorConformance,
    LifetimeConformance,
    FailureConformance,
    PoolConformance,
    TaskConformance,
    RunnerConformance,
):
    """All conformance tests, for the author of a platform: set `platform` in a subclass. Tests of
    capabilities that it lacks are skipped and say so."""
