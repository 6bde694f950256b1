"""Putting the simulator under `torch_npu`, in this process, before that is imported."""

from __future__ import annotations

import ctypes
import importlib
import io
import os
import platform
import sys
import threading
from contextlib import redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from graphrt.errors import PlatformError
from graphrt_ascend_sim import building

_NOTICE = (
    "graphrt: ascend-sim is a simulation of an Ascend NPU on the CPU; its times mean nothing.\n"
)
_lock = threading.Lock()
_device: ctypes.CDLL | None = None


def started() -> bool:
    """Whether the simulator is what `torch_npu` runs on in this process."""
    return _device is not None


def why_not() -> str | None:
    """Why the simulator cannot be started here, or None. Imports and builds nothing."""
    if started():
        return None
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"the simulator needs Linux on x86_64 or aarch64, not {platform.platform()}"
    try:
        found = version("torch_npu")
    except PackageNotFoundError:
        return "torch_npu is not installed, which the simulator runs under"
    if version("torch").split(".")[:2] != (of := found.split("."))[:2]:
        return f"torch_npu {found} needs torch {of[0]}.{of[1]}, found {version('torch')}"
    if find_spec("torch_npu") is None:
        return f"torch_npu {found} cannot be imported"
    if "torch_npu" in sys.modules:
        # A parent process may have put the simulator into LD_LIBRARY_PATH.
        return None if _inherited() is not None else "torch_npu was imported on another CANN before"
    if building.compiler() is None and not building.is_built():
        return "g++ is missing, which builds the simulator"
    return None


def start() -> None:
    """Build the simulator if need be, and import `torch_npu` on it; at once if that is done.

    Raises `PlatformError` where `why_not` has a reason or the build fails.
    """
    global _device
    with _lock:
        if started():
            return
        reason = why_not()
        if reason is not None:
            raise PlatformError(
                "the Ascend simulator cannot run here", got=reason, expected="torch_npu and g++"
            )
        sys.stderr.write(_NOTICE)
        inherited = _inherited() if "torch_npu" in sys.modules else None
        _device = _declared(inherited or _load())


def _cann() -> str:
    return os.environ.get("GRAPHRT_SIM_CANN") or building.VERSIONS[-1]


def _load() -> ctypes.CDLL:
    if _cann() not in building.VERSIONS:
        raise PlatformError(
            "the Ascend simulator is no such CANN",
            got=f"GRAPHRT_SIM_CANN={_cann()}",
            expected=", ".join(building.VERSIONS),
        )
    if not building.is_built():
        sys.stderr.write("graphrt: building the simulator, once; this takes minutes\n")
    directory = building.build()
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    directories = [directory]
    if _cann() == building.OLD_CANN:
        directories.insert(0, directory / building.OLD_CANN)
    paths = [*map(str, directories), os.environ.get("LD_LIBRARY_PATH", "")]
    # For the processes started from this one; it changes nothing here.
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
    # torch brings the libraries that the operators link against.
    importlib.import_module("torch")
    # The loader takes a library that is loaded already for every other one of its name.
    device = ctypes.CDLL(str(directories[0] / building.DEVICE_LIBRARY), mode=ctypes.RTLD_GLOBAL)
    for name in building.LIBRARIES[1:]:
        ctypes.CDLL(str(directory / name), mode=ctypes.RTLD_GLOBAL)
    # It prints that it misses the folder of a CANN, of which the simulator has none.
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            importlib.import_module("torch_npu")
    except ImportError as error:
        raise PlatformError(
            f"the Ascend simulator does not serve torch_npu {version('torch_npu')}",
            got=str(error),
            expected="a torch_npu that links only to functions of CANN that the simulator has",
            advice="torch_npu 2.13 or 2.14, which its tests ran with",
        ) from error
    lines = said.getvalue().splitlines(keepends=True)
    sys.stdout.write("".join(line for line in lines if "ASCEND_HOME_PATH" not in line))
    return device


def _inherited() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(building.DEVICE_LIBRARY)
    except OSError:
        return None
    return library if hasattr(library, "graphrt_simulated") else None


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.graphrt_sim_synchronizations.restype = ctypes.c_ulonglong
    library.graphrt_sim_set_schedule.argtypes = [ctypes.c_char_p]
    library.graphrt_sim_calls.restype = ctypes.c_ulonglong
    library.graphrt_sim_calls.argtypes = [ctypes.c_char_p]
    library.graphrt_sim_fail_call.argtypes = [ctypes.c_char_p, ctypes.c_ulonglong, ctypes.c_int]
    return library


def synchronizations() -> int:
    """How often the host has waited for a stream, an event or the device."""
    return int(_library().graphrt_sim_synchronizations())


def available_streams() -> int:
    """Streams that the device has left."""
    count = ctypes.c_uint32()
    _library().aclrtGetStreamAvailableNum(ctypes.byref(count))
    return count.value


def set_schedule(schedule: str) -> None:
    """How the device picks the next task from now on; as GRAPHRT_SIM_SCHEDULE.

    Raises `ValueError` for a schedule that does not exist.
    """
    if _library().graphrt_sim_set_schedule(schedule.encode()):
        raise ValueError(f"no such schedule: {schedule!r}")


def stream_id(stream: Any) -> int:
    """The id of a `torch.npu.Stream`, as the schedule slow:STREAM names it."""
    number = ctypes.c_int32()
    _library().aclrtStreamGetId(ctypes.c_void_p(stream.npu_stream), ctypes.byref(number))
    return number.value


def calls(function: str) -> int:
    """How often a function of CANN was called: one of the runtime (`aclmdlRIExecuteAsync`), or one
    of the two of an operator (`aclnnAddGetWorkspaceSize`, `aclnnAdd`).

    Raises `ValueError` for a function that the simulator does not have.
    """
    return int(_library().graphrt_sim_calls(_known(function)))


def fail_call(function: str, nth: int = 1, *, code: int = 507899) -> None:
    """Make the `nth` call of a function from now on fail with `code`, and do nothing.

    Failures of other calls stay wanted. Raises `ValueError` for a function that the simulator does
    not have, and for an `nth` or a `code` that no call has.
    """
    if nth < 1 or code == 0:
        raise ValueError(f"nth must be 1 or more and code an error, got nth={nth}, code={code}")
    _library().graphrt_sim_fail_call(_known(function), nth, code)


def fail_nothing() -> None:
    """Forget the failures that were asked for and have not come."""
    _library().graphrt_sim_fail_nothing()


def _known(function: str) -> bytes:
    operators = ctypes.CDLL(building.OPERATOR_LIBRARY)
    is_ours = function.startswith("acl")
    if not is_ours or not (hasattr(_library(), function) or hasattr(operators, function)):
        raise ValueError(f"the simulator has no function {function!r}")
    return function.encode()


def _library() -> ctypes.CDLL:
    start()
    assert _device is not None, "start() has set it"
    return _device
