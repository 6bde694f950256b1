"""Every warning that graphrt gives on purpose, and giving one."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from graphrt.core.base.homes import public


@public("graphrt.errors")
class InputRingWarning(UserWarning):
    """A device that could fetch inputs does not: they are copied before each launch."""


@public("graphrt.errors")
class PlanChangedWarning(UserWarning):
    """A saved plan comes out differently where it is loaded."""


@public("graphrt.errors")
class GraphsDroppedWarning(UserWarning):
    """Graphs of a plan did not fit on the device; their sizes run eagerly."""


@public("graphrt.errors")
class GraphMemoryWarning(UserWarning):
    """The graphs of a plan will take more memory than there is, or than they may."""


@public("graphrt.errors")
class StaleTensorWarning(UserWarning):
    """A forward leaves tensors of its graphs in Python, where no replay makes new ones."""


@public("graphrt.errors")
class GraphQuarantinedWarning(UserWarning):
    """Graphs that failed a check; their batches run eagerly from now on."""


def warn_caller(text: str, category: type[Warning]) -> None:
    """Warn of the line outside of graphrt that led here, through however many of its functions."""
    level = 1
    # The one name of it: a frame that has itself keeps the step's tensors until garbage is
    # collected.
    caller: FrameType | None = sys._getframe(0)
    while caller is not None and str(caller.f_globals.get("__name__")).startswith("graphrt."):
        level, caller = level + 1, caller.f_back
    warnings.warn(text, category, stacklevel=level)
