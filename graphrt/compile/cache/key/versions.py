"""Versions of what makes compiled code, and of what runs it."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import re
from functools import cache
from importlib import metadata
from pathlib import Path

import torch


def runtime_versions(device: torch.device | str | None = None) -> dict[str, str]:
    """Versions of what makes or runs compiled code on `device` (the current accelerator, or CPU).

    The CPU's own features count on a CPU only: its compiled code uses all of them.
    """
    found = torch.device(device) if device is not None else _accelerator()
    versions = {
        "graphrt": f"{_graphrt_version()}+{_package_digest()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "machine": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "torch_git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": _version("triton"),
        "torch_npu": _version("torch_npu"),
        "sympy": _version("sympy"),
        "numpy": _version("numpy"),
        "device": _device_name(found),
        "driver": cuda_driver_version() if found.type == "cuda" else None,
        "cpu": cpu_features() if found.type == "cpu" else None,
    }
    return {name: str(value) for name, value in versions.items() if value is not None}


def _graphrt_version() -> str:
    from graphrt._version import __version__

    return __version__


@cache
def _package_digest() -> str:
    """The code that splits and stitches decides about pieces as much as the compiler does."""
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
    """The CUDA version that the driver is for, such as "13.0"; None without one. What is kept as
    PTX becomes the device's code in the driver, and so does what it links."""
    name = "nvcuda.dll" if platform.system() == "Windows" else "libcuda.so.1"
    number = ctypes.c_int()
    try:
        status = ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # no NVIDIA driver, such as with ROCm
        return None
    return None if status else f"{number.value // 1000}.{number.value % 1000 // 10}"


@cache
def cpu_features() -> str:
    """What compiled code for this CPU may use: torch's name for it, and a digest of its flags."""
    level = torch.backends.cpu.get_cpu_capability()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{level} {platform.processor()}"
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    features = " ".join(sorted(flags[1].split())) if flags else ""
    return f"{level} {hashlib.sha256(features.encode()).hexdigest()[:12]}"
