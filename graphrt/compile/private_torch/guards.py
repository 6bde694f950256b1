"""Checks Dynamo's guards of a trace, without a call of Dynamo's code."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from graphrt.compile.private_torch.names import NAMES, private_attribute
from graphrt.compile.private_torch.sources import (
    defaults_name,
    is_argument,
    readable,
    source_name,
)
from graphrt.core.base.errors import MissingTorchNameError

_NO_GUARDS = "what changes outside of the arguments of compiled code is not seen"
_ENTRIES = NAMES.declare("torch._dynamo.eval_frame._debug_get_cache_entry_list", without=_NO_GUARDS)
_DYNAMO_PATCH = NAMES.declare("torch._dynamo.config.patch", without=_NO_GUARDS)
_SHORT_CUTS = {
    name: NAMES.declare(f"torch._dynamo.config.{name}", without="there is no such short cut")
    for name in (
        "skip_nnmodule_hook_guards",
        "skip_guards_on_constant_func_defaults",
        "assume_dunder_attributes_remain_unchanged",
        # By these a tensor counts as unchanged while the dict that holds it is not written.
        "skip_tensor_guards_with_matching_dict_tags",
        "use_recursive_dict_tags_for_guards",
    )
}
"""Settings, on in some versions, by which Dynamo leaves out guards or skips their checks."""

# Sizes, what the graph reads, and the settings of the process are compared elsewhere.
_NOT_KEPT = frozenset(("SHAPE_ENV", "TENSOR_SUBCLASS_METADATA_MATCH"))
_COMPARED_BY_ID = (FunctionType, CodeType, type, ModuleType)


class GuardEntry(Protocol):
    """One guard, as Dynamo shows it to a filter."""

    @property
    def name(self) -> str: ...
    @property
    def guard_type(self) -> str: ...
    @property
    def has_value(self) -> bool: ...
    @property
    def value(self) -> object: ...
    @property
    def orig_guard(self) -> Any: ...


class GuardFilter:
    """Selects the guards of one trace to keep: those on state that Python can change.

    `read` are Dynamo's names of the graph's inputs, to be set in the backend. These tensors are
    compared elsewhere. Guards on other tensors of a module are kept, as the forward reads their
    properties, such as a weight's dtype.
    """

    def __init__(self, text_of: Callable[[object], str]) -> None:
        """`text_of` describes a value in few words, for errors."""
        self._text_of = text_of
        self.texts: dict[str, tuple[str, str]] = {}
        """Dynamo's name of a value -> its name in words of the forward, its text at the trace."""
        self.zeros: dict[str, None] = {}
        """Names of floats that are 0.0 or -0.0."""
        self.defaults: dict[str, None] = {}
        """Names of functions' `__defaults__`."""
        self.kept_alive: list[object] = []
        """Functions, classes and modules that guards compare by id."""
        self.kinds: dict[type, None] = {}
        """Classes whose objects the forward reads, and those that it reads themselves."""
        self.read: frozenset[str] = frozenset()

    def __call__(self, entries: Sequence[GuardEntry]) -> list[bool]:
        for each in entries:
            source, name = each.orig_guard.originating_source, _name(each)
            if each.has_value:
                self.texts[name] = readable(source), self._text_of(each.value)
                kind = each.value if isinstance(each.value, type) else type(each.value)
                self.kinds[kind] = None
            if each.has_value and type(each.value) is float and each.value == 0:
                self.zeros[name] = None
            if default := defaults_name(source):
                self.defaults[default] = None
            if each.has_value and isinstance(each.value, _COMPARED_BY_ID):
                # The guard compares ids, and another object may get the id of a freed one.
                self.kept_alive.append(each.value)
        return [self._is_kept(each) for each in entries]

    def _is_kept(self, entry: GuardEntry) -> bool:
        if entry.guard_type == "TENSOR_MATCH":
            return not is_argument(entry.orig_guard.originating_source) and (
                _name(entry) not in self.read
            )
        if entry.guard_type == "DUPLICATE_INPUT":
            # Tied tensors are compared elsewhere, two names of one module are not.
            return entry.has_value and not isinstance(entry.value, torch.Tensor)
        return bool(entry.name) and entry.guard_type not in _NOT_KEPT


def _name(entry: GuardEntry) -> str:
    """Dynamo's name of a value; `entry.name` is a shortened one in some versions."""
    return source_name(entry.orig_guard)


def names_read(graph: fx.GraphModule) -> frozenset[str]:
    """Dynamo's names of a graph's inputs; to be called in the backend."""
    names = set()
    for node in graph.graph.find_nodes(op="placeholder"):
        source = getattr(node.meta.get("grapharg"), "source", None)
        if source is not None:
            names.add(source_name(source))
    return frozenset(names)


class _Property(NamedTuple):
    """A property that Dynamo's guards miss: `read_property(value)` must return `before` again.

    `code` computes the value of Dynamo's `name`; `text` says for an error what must hold.
    """

    name: str
    code: CodeType
    read_property: Callable[[Any], object]
    before: object
    text: str


class Broken(NamedTuple):
    """A guard that does not hold, as Dynamo writes it but for the name; its value's name in words
    of the forward ("" for none), with texts of the value now and at the trace."""

    name: str
    got: str
    before: str
    guard: str


class Guards:
    """Tells whether Python state is as it was at the trace of `function`, by the guards that the
    filter `kept` selected. `arguments` are the locals of `function`."""

    def __init__(
        self, function: FunctionType, kept: GuardFilter, arguments: Mapping[str, Any]
    ) -> None:
        entries = _ENTRIES.find()(function.__code__)
        manager = private_attribute(entries[0], "guard_manager", _NO_GUARDS)
        self._root = private_attribute(manager, "root", _NO_GUARDS)
        self._check: Callable[[Mapping[str, Any]], bool] = private_attribute(
            self._root, "check", _NO_GUARDS
        )
        # Dynamo deletes its own names from the globals when it forgets the trace: `hold` adds them.
        self._globals, self._names = function.__globals__, dict(function.__globals__)
        # Guards take 0.0 for -0.0, and in torch 2.11 compare defaults without their parameters.
        self._properties = [
            self._property_of(name, _sign, "{0} == {1}", arguments) for name in kept.zeros
        ]
        self._properties += [
            self._property_of(name, len, "len({0}) == {2}", arguments) for name in kept.defaults
        ]
        self.kinds = tuple(kept.kinds)
        """Classes whose methods the forward may call."""
        self._texts, self._text_of = kept.texts, kept._text_of
        # Kept alive, as the check uses them.
        self._kept = (manager, kept.kept_alive)

    def hold(self, arguments: Mapping[str, Any]) -> bool:
        """Whether nothing has changed since the trace."""
        if not self._check(arguments):
            if self._globals.keys() >= self._names.keys():
                return False
            self._globals.update({**self._names, **self._globals})
            if not self._check(arguments):
                return False
        return not self._properties or self._changed(arguments) is None

    def broken(self, arguments: Mapping[str, Any]) -> Broken:
        """The guard that does not hold."""
        failure = private_attribute(self._root, "check_verbose", _NO_GUARDS)(arguments)
        if not failure.result:
            parts = [str(part) for part in failure.verbose_code_parts]
            guard = parts[0].partition("  #")[0].strip() if parts else "an unnamed guard"
        else:
            guard = self._changed(arguments) or ""
        # The longest name in it: `len(L['self'].layers) == 4` has that of the module too.
        name = max((each for each in self._texts if each in guard), key=len, default="")
        if not name:
            return Broken(name, guard, "", guard)
        scope = {"__builtins__": {"dict": dict, "type": type}}
        try:
            got = self._text_of(eval(name, scope, {"L": arguments, "G": self._globals}))
        except (AttributeError, IndexError, KeyError, NameError, TypeError):
            got = "nothing"
        words, before = self._texts[name]
        return Broken(words, got, before, guard.replace(name, words))

    def _property_of(
        self,
        name: str,
        read_property: Callable[[Any], object],
        text: str,
        arguments: Mapping[str, Any],
    ) -> _Property:
        """A property of the value with Dynamo's name `name`, as it is at the trace."""
        code = compile(name, "<guard>", "eval")
        value: Any = eval(code, {"L": arguments, "G": self._globals})
        before = read_property(value)
        return _Property(name, code, read_property, before, text.format(name, value, before))

    def _changed(self, arguments: Mapping[str, Any]) -> str | None:
        """The text of the first property that differs from the trace; None if all are equal."""
        scope = {"L": arguments, "G": self._globals}
        for each in self._properties:
            if each.read_property(eval(each.code, scope)) != each.before:
                return each.text
        return None


def _sign(number: float) -> float:
    return math.copysign(1.0, number)


def all_guarded() -> AbstractContextManager[None]:
    """Traces in the block guard all state that Python can change, such as hooks of modules, and
    each check looks at every guard."""
    settings = {}
    for name, setting in _SHORT_CUTS.items():
        with contextlib.suppress(MissingTorchNameError):
            setting.find()
            settings[name] = False
    block: AbstractContextManager[None] = _DYNAMO_PATCH.find()(**settings)
    return block


_HOOKS = [
    NAMES.declare(f"torch.nn.modules.module._global_forward_{name}", without=_NO_GUARDS)
    for name in ("pre_hooks", "hooks")
]


def hooks_of_all_modules() -> list[int]:
    """The numbers of the hooks that every module calls, which not every version guards."""
    return [number for hooks in _HOOKS for number in hooks.find()]


def function_modes() -> int:
    """How many torch-function modes are on."""
    return _function_modes()


_function_modes: Callable[[], int] = NAMES.take(
    "torch._C._len_torch_function_stack", without=_NO_GUARDS
)
