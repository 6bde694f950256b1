"""Where a value of a trace comes from, as Dynamo's objects tell: arguments, attributes, globals."""

from __future__ import annotations

from typing import Any

TRACED = "_call"
"""The global of the traced code that is the module or function."""
_HELD = ("_modules", "_parameters", "_buffers")


def source_name(source: Any) -> str:
    """Dynamo's name, which is Python to compute the value: "L['x'].size()[0]"."""
    return str(source.name() if callable(source.name) else source.name)


def readable(source: Any) -> str:
    """The name in words of the forward: "module.layers.0", "x[0]". Raises `NotImplementedError` for
    what the forward makes itself."""
    base, whole = getattr(source, "base", None), source_name(source)
    if base is None:
        name = str(getattr(source, "global_name", None) or getattr(source, "local_name", ""))
        imported = name.removeprefix("__import_")
        if imported != name:
            return imported.replace("_dot_", ".")
        return "module" if name == TRACED else name or whole
    inner, member = readable(base), getattr(source, "member", None)
    if member in _HELD or (member == "__self__" and inner == "module"):
        return inner
    if getattr(base, "member", None) in _HELD:
        return f"{inner}.{source.index}"
    return whole.replace(source_name(base), inner)


def is_argument(source: Any) -> bool:
    """Whether it is an argument of the traced call, or in one."""
    while hasattr(source, "base"):
        source = source.base
    return type(source).__name__ == "LocalSource"


def size_place(source: Any) -> tuple[str, int] | None:
    """Dynamo's name of a tensor, and the dimension whose size it is; None if it is no size."""
    if getattr(getattr(source, "prop", None), "name", "") != "SIZE":
        return None
    return source_name(source.base), int(source.idx)


def defaults_name(source: Any) -> str:
    """Dynamo's name of a function's `__defaults__` for one of them; "" for anything else."""
    is_default = getattr(source, "field", "") == "__defaults__"
    return f"{source_name(source.base)}.__defaults__" if is_default else ""
