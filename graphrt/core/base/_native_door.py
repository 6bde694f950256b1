"""What `setup.py` compiles of native/. Without a build each is None, and Python does the same."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from graphrt.core.base.log import logger
from graphrt.core.base.native_sources import fingerprints, newest

VARIABLE = "GRAPHRT_NATIVE"
_NOT_BUILT = "it was not built; install graphrt again where there is a C compiler"
_STALE = "it was built from other sources than these; pip install . builds it again"


def _load() -> tuple[Any, str]:
    """The compiled module, None where it is left out; and "in use", or why it is not."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None, "there is none for free-threaded builds of Python"
    if os.environ.get(VARIABLE) == "0":
        return None, f"{VARIABLE}=0 leaves it out"
    try:
        native = import_module(f"{__package__}._native")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        return None, _NOT_BUILT if missing else f"it cannot be loaded: {error}"
    try:
        package = Path(__file__).parents[2]
        # To hash takes a tenth of a second: only where a file is as new as the build. A wheel has
        # no C files: its build matches its modules.
        is_older = newest(package) < Path(str(native.__file__)).stat().st_mtime
        now = {} if is_older else fingerprints(package)
    except OSError as error:
        return None, f"its sources cannot be read: {error}"
    if any(getattr(native, name, None) != value for name, value in now.items()):
        logger.warning("steps run in Python, not in C: %s", _STALE)
        return None, _STALE
    return native, "in use"


_native, native_state = _load()
NativeWriter: Callable[..., Callable[..., bool]] | None = getattr(_native, "Writer", None)
"""Writes the slot of a step whose inputs are like those of an earlier one."""
NativeReplay: Callable[..., Any] | None = getattr(_native, "Replay", None)
"""Runs a step that is one graph, with such inputs and one tensor as its output."""
NativePath: Callable[..., Callable[..., Any]] | None = getattr(_native, "Path", None)
"""Takes a step whose batch was dispatched before to its graph: `StepEngine.step` in C."""
NativeGlances: Callable[..., Iterator[bool]] | None = getattr(_native, "Glances", None)
"""Looks at a few slots and tensors at each step."""
NativeWatch: Any = getattr(_native, "Watch", None)
"""Notes changes of dicts, on CPython 3.12 and 3.13."""
MOST_INPUTS = 0 if _native is None else _native.MOST_INPUTS
"""The most inputs that a `NativeWriter` can write."""
