"""The door to what `setup.py` compiles of native/: each is None where it was not built."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def _built() -> Any:
    try:
        return import_module(f"{__package__}._native")
    except ModuleNotFoundError:
        return None


_native = _built()
NativeWriter: Callable[..., Callable[[Any, Any, bool], bool]] | None = (
    None if _native is None else _native.Writer
)
"""Writes the slot of a step whose inputs are like those of an earlier one."""
NativeReplay: Callable[..., Any] | None = None if _native is None else _native.Replay
"""Runs a step that is one graph, with such inputs and one tensor as its output."""
NativePath: Callable[..., Callable[..., Any]] | None = None if _native is None else _native.Path
"""Takes a step whose batch is the last one's again to its graph."""
MOST_INPUTS = 0 if _native is None else _native.MOST_INPUTS
"""So many inputs a `NativeWriter` can write."""
