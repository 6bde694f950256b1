"""Every warning that graphrt gives on purpose."""

from __future__ import annotations


class InputRingWarning(UserWarning):
    """A device that could fetch inputs does not: they are copied before each launch."""


class PlanChangedWarning(UserWarning):
    """A saved plan comes out differently where it is loaded."""


class GraphsDroppedWarning(UserWarning):
    """Graphs of a plan did not fit on the device; their sizes run eagerly."""


class GraphQuarantinedWarning(UserWarning):
    """Graphs that failed a check; their batches run eagerly from now on."""
