"""Stands in for packages that SGLang imports without a need: put this folder on PYTHONPATH.

A name of theirs may be imported and looked up, nothing else: a call, a comparison, or any other use
raises `StandInUsed`, so that no kernel is ever replaced. Names looked up are appended to the file
that GRAPHRT_STAND_INS names, one a line. Packages that are installed are left alone.
"""

import faulthandler
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import types
from collections.abc import Callable
from typing import Any

PACKAGES = ("IPython", "datasets", "flashinfer")
ABSENT = ("flashinfer.norm",)  # sgl_kernel then takes its own kernels


class StandInUsed(RuntimeError):
    """A name of a package that is not here was used."""


def _record(name: str) -> None:
    path = os.environ.get("GRAPHRT_STAND_INS")
    if path:
        with open(path, "a") as log:
            log.write(f"{name}\n")


def _refuse(operation: str) -> Callable[..., Any]:
    def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
        _record(f"USED {self._path} {operation}")
        raise StandInUsed(f"{self._path}: {operation}, but its package is not here")

    return refused


class _StandIn:
    """A name of a package that is not here."""

    def __init__(self, path: str) -> None:
        self.__dict__["_path"] = path

    def __getattr__(self, name: str) -> Any:
        return _looked_up(self._path, name)

    __hash__ = object.__hash__


_OPERATIONS = """
call bool eq ne lt le gt ge iter len getitem setitem contains add sub mul truediv floordiv mod pow
neg or and xor index int float enter exit next await mro_entries instancecheck subclasscheck setattr
"""
for _name in _OPERATIONS.split():
    setattr(_StandIn, f"__{_name}__", _refuse(f"__{_name}__"))


def _looked_up(path: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    _record(f"{path}.{name}")
    return _StandIn(f"{path}.{name}")


class _Package(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _looked_up(self.__name__, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: it is asked for what no other one has."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in PACKAGES and name not in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        _record(spec.name)
        package = _Package(spec.name)
        package.__version__ = "0"
        return package

    def exec_module(self, module: Any) -> None:
        pass


sys.meta_path.append(_Finder())
# Each process of an engine tells where it is when it is stopped from outside.
faulthandler.register(signal.SIGUSR1, all_threads=True)
