"""The way to names of torch that are not public: declared once, with what happens without them.

Each package that needs some has one module, its door, which declares them all with `PrivateNames`
and hands them out; nothing else in the package says `torch._`. A test lists every name by the
versions of torch that have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from graphrt.core.base.errors import MissingTorchNameError

TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The versions of torch that graphrt's tests have run on, oldest first."""

_NOTHING = object()
"""Stands for a part of a path that is not there."""


@dataclass(frozen=True)
class PrivateName:
    """A name that is not public: `path` is dotted, `seen` are the versions of torch it was found
    in, `without` says what graphrt does where it is missing.

    `build` is "cuda" for what only a torch that was built with CUDA (or ROCm) has, "npu" for what
    is torch_npu's, whose versions are torch's; "" for what every torch has.
    """

    path: str
    without: str
    seen: tuple[str, ...] = TESTED
    build: str = ""

    def find(self) -> Any:
        """The object, importing what it is in; raises `MissingTorchNameError`."""
        value, path = None, ""
        for part in self.path.split("."):
            path = f"{path}.{part}".lstrip(".")
            # A module goes before a function of its name: torch._inductor has one of each.
            is_package = value is None or "__path__" in getattr(value, "__dict__", ())
            module = imported(path) if is_package else None
            value = module or getattr(value, part, _NOTHING)
            if value is _NOTHING:
                raise MissingTorchNameError(
                    f"this torch has no {self.path}",
                    got=f"torch {torch.__version__}",
                    expected=f"torch {', '.join(self.seen)}",
                    advice=f"without it {self.without}",
                )
        return value

    def __bool__(self) -> bool:
        """Whether this torch has it."""
        try:
            self.find()
        except MissingTorchNameError:
            return False
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.find()(*args, **kwargs)


class PrivateNames:
    """The names that one package uses, in `declared`."""

    def __init__(self) -> None:
        self.declared: dict[str, PrivateName] = {}

    def declare(
        self, path: str, *, without: str, seen: tuple[str, ...] = TESTED, build: str = ""
    ) -> PrivateName:
        """Declare a name that is looked up when it is needed."""
        name = self.declared[path] = PrivateName(path, without, seen, build)
        return name

    def take(
        self, path: str, *, without: str, seen: tuple[str, ...] = TESTED, build: str = ""
    ) -> Any:
        """Declare a function and return it; where it is missing its name, which is false and raises
        when it is called, so that no import fails."""
        name = self.declare(path, without=without, seen=seen, build=build)
        return name.find() if name else name


def imported(path: str) -> Any:
    """The module `path`; None if it does not exist. A broken module raises its own error."""
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        # Only a missing part of this path: another one is a broken module, and says so itself.
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise
        return None
