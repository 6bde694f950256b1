"""Public names say where hosts import them from, as tracebacks, `help` and reprs show it."""

from __future__ import annotations

from types import FunctionType


def at_home(home: str, *values: object) -> None:
    """Let these classes and functions of graphrt name the module of the surface that they are
    imported from; anything else is left as it is."""
    for value in values:
        if isinstance(value, type | FunctionType) and value.__module__.startswith("graphrt."):
            value.__module__ = home
