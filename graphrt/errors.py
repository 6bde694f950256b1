"""Every error and warning that graphrt gives on purpose: one class per cause, one root.

A message says what happened, the offending value, the expected one and one thing to try; each part
is an attribute too. What compiling refuses is in `graphrt.compile`: its errors have the same root.
"""

# ruff: noqa: F403, F405  (each name is listed once, below)
from __future__ import annotations

from graphrt._homes import at_home
from graphrt.core.base.errors import *
from graphrt.core.device.registry import PluginWarning

__all__ = [
    "BakedScalarError",
    "BreakError",
    "BreakWarning",
    "CaptureError",
    "CaptureSealedError",
    "CaptureSyncError",
    "CheckpointError",
    "DeviceHangError",
    "FrozenMetadataError",
    "GraphMemoryWarning",
    "GraphQuarantinedWarning",
    "GraphRTError",
    "GraphsDroppedWarning",
    "InputRingWarning",
    "InvalidBatchError",
    "InvalidInputError",
    "InvalidModeError",
    "InvalidOptionError",
    "InvalidUpdateError",
    "LaunchQueueError",
    "MissingCapabilityError",
    "MissingTorchNameError",
    "MissingUpdateError",
    "NestedCaptureError",
    "OutputError",
    "OverwrittenOutputError",
    "PageableCopyError",
    "PlanChangedWarning",
    "PlanFileError",
    "PlatformError",
    "PluginWarning",
    "PoolAsleepError",
    "PoolBusyError",
    "PoolClosedError",
    "PoolError",
    "PythonStateError",
    "RefusedOpError",
    "ResourceExhaustedError",
    "RowsMixedError",
    "SideDoorError",
    "StaleInputError",
    "StaleTensorWarning",
    "StateTooLargeError",
    "StreamBudgetError",
    "TaskContractError",
    "TaskError",
    "UnsupportedHostError",
    "UntrackedWeightsError",
    "VerificationError",
]

at_home(__name__, *map(globals().__getitem__, __all__))
