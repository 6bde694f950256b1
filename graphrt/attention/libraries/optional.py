"""Libraries of kernels that not every machine has, imported when an adapter needs them."""

from __future__ import annotations

import importlib
from typing import Any

from graphrt.core.base.errors import UnsupportedHostError
from graphrt.core.base.texts import error_line


def load(module: str, package: str) -> Any:
    """The module of an optional library; raises `UnsupportedHostError`."""
    try:
        return importlib.import_module(module)
    # A library that was built for another torch or CUDA fails in its own ways.
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module
        raise UnsupportedHostError(
            f"{package} is not installed" if missing else f"{package} cannot be imported",
            got=error_line(error),
            expected=f"a module {module!r} that works with this torch",
            advice=f"install {package}, or use SdpaAttention, which needs nothing but torch",
        ) from error
