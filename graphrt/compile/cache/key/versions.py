"""Versions of the software and the device, and the settings of torch and its compilers."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import re
import uuid
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from graphrt.compile.cache.key.code import PACKAGES
from graphrt.compile.cache.key.values import Values
from graphrt.compile.private_torch import inductor
from graphrt.core.base.settings import settings


def runtime_versions(*devices: torch.device | str) -> dict[str, str]:
    """Versions that compiled code on `devices` depends on (the current accelerator, or the CPU).

    The CPU's own features count where it is among them: its compiled code uses all of them.
    """
    targets = [torch.device(each) for each in devices] or [_accelerator()]
    kinds = {each.type for each in targets}
    versions = {
        "graphrt": f"{_graphrt_version()}+{_package_digest()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "machine": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "torch_git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        **{name: _version(name) for name in ("torch_npu", *PACKAGES)},
        "device": ", ".join(sorted(set(map(_device_name, targets)))),
        "driver": cuda_driver_version() if "cuda" in kinds else None,
        "cpu": cpu_features() if "cpu" in kinds else None,
    }
    return {name: str(value) for name, value in versions.items() if value is not None}


def _graphrt_version() -> str:
    from graphrt._version import __version__

    return __version__


@cache
def _package_digest() -> str:
    """A hash of `graphrt.compile`, which decides about pieces as much as the compiler does."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[2]
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _accelerator() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    module = torch.get_device_module(device)
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else ""
    capability = getattr(module, "get_device_capability", None)
    version = capability(device) if capability is not None else None
    numbers = ".".join(map(str, version)) if isinstance(version, tuple) else ""
    return " ".join(filter(None, (device.type, name, numbers)))


@cache
def cuda_driver_version() -> str | None:
    """The CUDA version that the driver is for, such as "13.0"; None without a driver. The driver
    compiles kernels that are kept as PTX, and links."""
    name = "nvcuda.dll" if platform.system() == "Windows" else "libcuda.so.1"
    number = ctypes.c_int()
    try:
        status = ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # no NVIDIA driver, such as with ROCm
        return None
    return None if status else f"{number.value // 1000}.{number.value % 1000 // 10}"


@cache
def cpu_features() -> str:
    """The instructions that code for this CPU may use: torch's name, and a digest of its flags."""
    level = torch.backends.cpu.get_cpu_capability()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{level} {platform.processor()}"
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    features = " ".join(sorted(flags[1].split())) if flags else ""
    return f"{level} {hashlib.sha256(features.encode()).hexdigest()[:12]}"


def ambient_state(*kinds: str) -> dict[str, object]:
    """The settings of torch around a trace; for a CPU the number of threads, which its code has."""
    values = Values()
    found = {row.name: _plain(row.read(), values) for row in settings() if row.key}
    if "cpu" in kinds:
        found["threads"] = torch.get_num_threads()
    return found


def compiler_settings(values: Values) -> dict[str, object]:
    """Every setting of Dynamo, AOTAutograd and Inductor that changes code, custom passes too.

    Raises `MissingTorchNameError` where this torch cannot tell them.
    """
    return {name: _plain(each, values) for name, each in inductor.compiler_settings().items()}


def _plain(value: object, values: Values) -> object:
    """A setting as it stands in the key: equal on another machine. Of a path only the last part
    counts, of a function its code."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return Path(value).name if os.path.isabs(value) else value
    if isinstance(value, Mapping):
        return {str(_plain(key, values)): _plain(each, values) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each, values) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_plain(each, values)) for each in value)
    if hasattr(value, "uuid") and not isinstance(value, type):
        identity = value.uuid()
        # None is torch's "do not cache me": such a key is never met again.
        name = uuid.uuid4().hex if identity is None else repr(identity)
        return f"{type(value).__qualname__} {name}"
    return values.of(value)
