"""`ModulePicture`: finds changes of a denoiser that its graphs would not see.

Between two images people load a LoRA, change its weight, replace attention processors or move the
pipeline. A runner finds a moved weight after some steps; here the first call after the change must
not be replayed. So each call compares the module with a picture of it:

1. containers with copies of them: the attributes of each module, its parameters, buffers,
   submodules and hooks, and what its own attributes lead to (`_Walk`): dicts, lists, objects such
   as processors and their controllers, closures of functions;
2. each tensor in them, which must be the same object at the same address, with the same shape,
   strides and dtype.

C does most of the comparing, at half a microsecond a module. A module that leads to an object
of unknown insides, or to too many values, is named in `unseen`: it could change without a sign.
Limit: attributes of classes, globals, and values inside of the standard library's own objects are
not compared.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from operator import getitem, is_
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base.torch_names import global_hooks
from graphrt.trust.places.libraries import is_library, is_library_class

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_INNER = ("_parameters", "_buffers", "_modules", *_HOOKS)
_TORCHS = frozenset(vars(torch.nn.Module()))
"""Attributes that torch gives to every module."""

MOST_VALUES = 10_000
"""The most values that one attribute of a module may lead to: a call compares some 10 million a
second."""

_COMPARED = (dict, OrderedDict, defaultdict, list, deque, set)
"""Containers that C compares with a copy."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_METHODS = (types.MethodType, types.BuiltinMethodType)
"""Equal ones are of the same object."""
_FIXED = (torch.Tensor, type, types.ModuleType)
_FIXED_HOMES = frozenset({"graphrt", "logging", "threading", "weakref"})
"""Packages whose objects are not compared: graphrt's own, and those whose changes mean nothing for
a forward."""

OFFLOADING, REGISTRY = "_hf_hook", "_diffusers_hook"
"""Attributes by which accelerate and diffusers mark a module that has their hooks."""

_NOT_ENTERED = _TORCHS | {REGISTRY, "_old_forward"}


class ModulePicture:
    """Tells whether a module is still as it was when graphs were captured of it."""

    def __init__(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        """`forward` is the one that graphs were captured of."""
        walk = _Walk(module, forward)
        self._containers, self._readers = walk.containers, walk.readers
        # What containers and readers held when the picture was taken.
        self._copies = [container.copy() for container in self._containers]
        self._read = self._read_now()
        # Members that are compared by identity, in three lists for C: container, key, value.
        self._held: list[Any] = []
        self._keys: list[Any] = []
        self._same: list[Any] = []
        self._tensors = walk.tensors
        for container in self._containers:
            if type(container) is set:  # a member keeps what its hash depends on
                continue
            for key, value in _items_of(container):
                is_watched = isinstance(value, torch.Tensor) or id(value) in walk.entered
                if is_watched and _is_equal_to_others(value):
                    self._held.append(container)
                    self._keys.append(key)
                    self._same.append(value)
        self._in_memory = [tensor for tensor in self._tensors if _has_address(tensor)]
        # The addresses, shapes, strides and dtypes of these tensors.
        self._placements = self._placements_now()
        self.hook = next(_hooks_of(module), None)
        """The hook that a replay would leave out, if there is one."""
        self.unseen = walk.unseen
        """The object that could change without being noticed, if there is one."""

    def holds(self) -> bool:
        """Whether the module is still the same."""
        try:
            if self._containers != self._copies:
                return False
            # By identity: one-element tensors compare by value, and equal lists may be two lists.
            if not all(map(is_, map(getitem, self._held, self._keys), self._same)):
                return False
            if self._readers and not _are_same(self._read_now(), self._read):
                return False
        except (RuntimeError, ValueError, TypeError, LookupError):
            # A tensor or an array was replaced by another: their == is no bool.
            return False
        return self._placements == self._placements_now()

    def equals(self, other: ModulePicture) -> bool:
        """Whether graphs captured for one picture serve the other: containers may be new ones of
        equal values."""
        try:
            same = self._copies == other._copies and self._read == other._read
        except (RuntimeError, ValueError, TypeError):
            return False
        return (
            same
            and len(self._tensors) == len(other._tensors)
            and all(map(is_, self._tensors, other._tensors))
            and self._placements == other._placements
        )

    def _placements_now(self) -> list[list[object]]:
        return [[*map(part, self._in_memory)] for part in tree.PLACEMENT]

    def _read_now(self) -> list[list[Any]]:
        return [read() for read in self._readers]


class _Walk:
    """Collects the containers, readers and tensors that a module leads to, each once, in a fixed
    order."""

    def __init__(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        self.containers: list[Any] = []
        self.readers: list[Callable[[], list[Any]]] = []
        """For objects that are no container: functions that return what an object holds now."""
        self.tensors: list[torch.Tensor] = []
        self.unseen: str | None = None
        """The first object that could change without being noticed."""
        parts = dict(module.named_modules())
        modules = {id(part) for part in parts.values()}
        # ids of the modules, and of objects that were walked already.
        self.entered = modules | {id(vars(part)) for part in parts.values()}
        self._kept: list[object] = []
        for path, part in parts.items():
            attributes = vars(part)
            for container in (attributes, *(attributes[name] for name in _INNER)):
                self._add(container)
            for name, value in attributes.items():
                if name not in _NOT_ENTERED:
                    self._enter(f"{name} of {_where(path)}", value)
        self._enter("the forward", forward)

    def _add(self, container: Any) -> None:
        self.containers.append(container)
        values = (value for _, value in _items_of(container))
        self.tensors += [value for value in values if isinstance(value, torch.Tensor)]

    def _enter(self, path: str, value: Any) -> None:
        queue, values_left = deque([value]), MOST_VALUES
        while queue:
            value = queue.popleft()
            if type(value) in _PLAIN or isinstance(value, _FIXED) or id(value) in self.entered:
                continue
            self.entered.add(id(value))
            self._kept.append(value)  # alive, as a new object might get its id
            members = self._inside(path, value)
            values_left -= len(members)
            if values_left < 0:
                self.unseen = self.unseen or f"{path} leads to more than {MOST_VALUES} values"
                return
            queue += members

    def _inside(self, path: str, value: Any) -> list[Any]:
        """The members of a value, which is added to the compared containers or readers."""
        kind = type(value)
        if kind in _COMPARED:
            self._add(value)
            return [item for _, item in _items_of(value)]
        home = _home_of(kind)
        if home.partition(".")[0] in _FIXED_HOMES:
            return []
        attributes = getattr(value, "__dict__", None)
        members = self._attributes_of(value, attributes) if isinstance(attributes, dict) else []
        fixed_members = _fixed_inside(value)
        read = None if fixed_members is not None else _reader_of(value, home)
        if read is not None:
            self.readers.append(read)
        # Neither Python attributes nor a known container, and state in C.
        elif fixed_members is None and not isinstance(attributes, dict) and _is_opaque(kind):
            self.unseen = self.unseen or f"{path} leads to a {home}.{kind.__qualname__}"
        other_members = read() if read is not None else fixed_members or []
        self.tensors += [item for item in other_members if isinstance(item, torch.Tensor)]
        return members + other_members

    def _attributes_of(self, value: Any, attributes: dict[str, Any]) -> list[Any]:
        """The attributes of a value, such as of attention processors that are no modules."""
        self.entered.add(id(attributes))
        self._add(attributes)
        if not isinstance(value, torch.nn.Module):
            return [*attributes.values()]
        inner = [item for name, item in attributes.items() if name in _INNER]
        return inner + [item for name, item in attributes.items() if name not in _NOT_ENTERED]


def _fixed_inside(value: Any) -> list[Any] | None:
    """The members of a value whose members cannot change; None for other values."""
    if isinstance(value, (tuple, frozenset)):
        return list(value)
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    return None


def _reader_of(value: Any, home: str) -> Callable[[], list[Any]] | None:
    """A function that returns what a value holds beside its `__dict__`; None if that is unknown."""
    if isinstance(value, types.FunctionType):
        is_librarys = is_library(value.__module__ or "", value.__globals__)
        return None if is_librarys else functools.partial(_of_function, value)
    if isinstance(value, dict):
        return lambda: [*dict.keys(value), *dict.values(value)]
    if isinstance(value, (list, set, deque)):
        return lambda: [*value]
    if home == "numpy" and hasattr(value, "tobytes"):
        return lambda: [value.shape, str(value.dtype), value.tobytes()]
    slots = [name for cls in type(value).__mro__ for name in _slots_of(cls)]
    if slots:
        return lambda: [getattr(value, name, _MISSING) for name in slots]
    return None


_MISSING = "this slot is empty"


def _slots_of(cls: type) -> list[str]:
    if is_library_class(cls):
        return []
    members = vars(cls).items()
    return [name for name, each in members if isinstance(each, types.MemberDescriptorType)]


def _home_of(kind: type) -> str:
    """The module of a type; those that are written in C name it nowhere else."""
    name: object = kind.__module__
    return name if isinstance(name, str) else "builtins"


def _is_opaque(kind: type) -> bool:
    """Whether objects of a type have state in C that Python does not show."""
    return not is_library_class(kind) and kind.__basicsize__ > object.__basicsize__


def _of_function(function: types.FunctionType) -> list[Any]:
    cells = function.__closure__ or ()
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return [*map(_of_cell, cells), *defaults]


def _of_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that has no value yet
        return _MISSING


def _is_equal_to_others(value: Any) -> bool:
    """Whether another object can be equal to `value` now and change without it later."""
    kind = type(value)
    if kind in _PLAIN:
        return False
    if kind is tuple:
        return not all(type(item) in _PLAIN for item in value)
    compare: object = kind.__eq__
    return compare is not object.__eq__ and not isinstance(value, _METHODS)


def _are_same(now: list[list[Any]], before: list[list[Any]]) -> bool:
    """Whether all is equal, and identical where being equal is not enough."""
    return now == before and all(
        value is value_before or not _is_equal_to_others(value)
        for held, held_before in zip(now, before, strict=True)
        for value, value_before in zip(held, held_before, strict=True)
    )


def _items_of(container: Any) -> Any:
    return container.items() if isinstance(container, dict) else enumerate(container)


def _has_address(tensor: torch.Tensor) -> bool:
    """Whether a tensor tells its address and shape: some subclasses, and sparse ones, do not."""
    try:
        for part in tree.PLACEMENT:
            part(tensor)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _where(path: str) -> str:
    return f"submodule {path}" if path else "the denoiser"


def global_hook() -> str | None:
    """The hooks of all modules that torch has now, if there are any: a replay calls none."""
    return next((f"torch has {name}" for name, hooks in global_hooks.items() if hooks), None)


def _hooks_of(module: torch.nn.Module) -> Iterator[str]:
    for path, each in module.named_modules():
        where = _where(path)
        registry = getattr(each, REGISTRY, None)
        if hasattr(each, OFFLOADING):
            yield f"{where} has a hook of accelerate"
        elif registry is not None and registry.hooks:
            yield f"{where} has the hooks {', '.join(registry.hooks)}"
        elif path and any(getattr(each, name) for name in _HOOKS):
            yield f"{where} has a forward hook"
