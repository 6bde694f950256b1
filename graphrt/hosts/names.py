"""Dotted names of a host's package, which an adapter checks before it relies on them."""

from __future__ import annotations

import importlib
from typing import Any

MISSING: Any = object()


def find(module: str, path: str) -> Any:
    """The object of a dotted name of a module; `MISSING` if there is none."""
    try:
        value: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        return MISSING
    for name in path.split("."):
        value = getattr(value, name, MISSING)
        if value is MISSING:
            break
    return value
