"""`torch_npu` and what it says about this machine; imported when asked for, never before."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from graphrt.core.device.platform import Availability

_LIBRARY = re.compile(r"(lib[\w.+-]+?\.so[\w.]*): cannot open shared object file")
_DRIVER_LIBRARIES = ("libascend_hal", "libdcmi", "libdrvdsmi")
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def torch_npu() -> Any:
    return importlib.import_module("torch_npu")


def availability() -> Availability:
    """Whether `torch_npu` can be imported here and finds a device; never raises."""
    try:
        if importlib.util.find_spec("torch_npu") is None:
            return Availability(False, "torch_npu is not installed")
        count = torch_npu().npu.device_count()
    except Exception as error:  # a broken installation fails in ways nobody can list
        return Availability(False, f"torch_npu cannot be imported: {explain_import(error)}")
    if not count:
        return Availability(False, "torch_npu finds no NPU (driver, ASCEND_RT_VISIBLE_DEVICES)")
    return Availability(True)


def explain_import(error: BaseException) -> str:
    """Why `import torch_npu` failed, and what to do about it, on one line."""
    text = str(error)
    reason = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    library = _LIBRARY.search(text)
    if library is not None:
        advice = _missing_library(library[1])
    elif "undefined symbol" in text:
        advice = (
            f"it was built for another torch or CANN than there is (torch {torch.__version__}); "
            "install the torch_npu of the same version"
        )
    elif isinstance(error, ModuleNotFoundError) and error.name:
        package = {"yaml": "pyyaml"}.get(error.name, error.name)
        advice = f"pip install {package}"
    else:
        return reason
    return f"{reason}: {advice}"


def environment_notes(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """What the variables of this process mean for graphs on an NPU, as sentences."""
    environ = os.environ if environ is None else environ
    notes = []
    if environ.get("ASCEND_LAUNCH_BLOCKING", "0") == "1":
        notes.append(
            "ASCEND_LAUNCH_BLOCKING=1 makes the host wait for every operator and replay; unset it "
            "unless you are looking for an error"
        )
    if environ.get("TASK_QUEUE_ENABLE", "1") == "2":
        notes.append("TASK_QUEUE_ENABLE=2 does not go with captures; set it to 1")
    return tuple(notes)


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "torch_npu": importlib.metadata.version("torch_npu")}


def device_name() -> str:
    """torch_npu's name of the current device."""
    return str(torch_npu().npu.get_device_name())


def available_streams() -> int | None:
    """Streams of the current device that are free now; None where CANN cannot be asked.

    The device must have been used before, as importing torch_npu does not open it.
    """
    try:
        ask = ctypes.CDLL("libascendcl.so").aclrtGetStreamAvailableNum
    except (OSError, AttributeError):  # no CANN, or one that is too old to say
        return None
    count = ctypes.c_uint32()
    return None if ask(ctypes.byref(count)) else count.value


@cache
def has_value_wait() -> bool:
    """Whether signals of tasks are words in memory, which a wait resets itself. With an older CANN
    they are events, which must be reset. Without CANN it does not matter."""
    try:
        return hasattr(ctypes.CDLL("libascendcl.so"), "aclrtValueWait")
    except OSError:
        return True


def _missing_library(name: str) -> str:
    if name.startswith(_DRIVER_LIBRARIES):
        return (
            "the NPU driver is not installed, or not mounted into this container; install it, or "
            "start the container with the driver's folders and /dev/davinci*"
        )
    if name.startswith(("libtorch", "libc10")):
        return f"it was built for another torch than there is (torch {torch.__version__})"
    return (
        "a library of CANN is missing; install CANN and source its set_env.sh. Until then "
        f"`import torch` fails too, unless {_AUTOLOAD}=0"
    )
