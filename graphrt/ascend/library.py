"""`torch_npu` and what it says about this machine; imported when asked for, never before."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from typing import Any

import torch

from graphrt.core.platform import Availability, Limits

# Documented streams of a device, by the start of its name; all processes on it share them.
_STREAMS = {"Ascend310P": 1024, "Ascend310B": 512, "Ascend910A": 2048}


def torch_npu() -> Any:
    return importlib.import_module("torch_npu")


def availability() -> Availability:
    """Whether `torch_npu` can be imported here and finds a device; never raises."""
    if importlib.util.find_spec("torch_npu") is None:
        return Availability(False, "torch_npu is not installed")
    try:
        count = torch_npu().npu.device_count()
    except Exception as error:  # a broken installation fails in ways nobody can list
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        hint = "; source CANN's set_env.sh" if ".so" in reason else ""
        return Availability(False, f"torch_npu cannot be imported: {reason}{hint}")
    if not count:
        return Availability(False, "torch_npu finds no NPU (driver, ASCEND_RT_VISIBLE_DEVICES)")
    return Availability(True)


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "torch_npu": importlib.metadata.version("torch_npu")}


def limits() -> Limits:
    device = torch_npu().npu.get_device_name()
    found = (limit for start, limit in _STREAMS.items() if device.startswith(start))
    return Limits(streams=next(found, 1984))
