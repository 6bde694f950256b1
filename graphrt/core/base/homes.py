"""Public names say where hosts import them from, as tracebacks, `help` and reprs show it."""

from __future__ import annotations

from types import FunctionType, ModuleType


def show_home(module: ModuleType, *, moved_from: str) -> None:
    """Let classes and functions in `__all__` of `module` name it, not the private module below
    `moved_from` that they are written in. What lies elsewhere keeps the home that it has."""
    below = f"{moved_from}."
    for name in module.__all__:
        value = vars(module).get(name)  # not getattr: some names are loaded when asked for
        if isinstance(value, (type, FunctionType)) and value.__module__.startswith(below):
            value.__module__ = module.__name__
