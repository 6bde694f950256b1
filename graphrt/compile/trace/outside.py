"""Attributes, globals, hooks and settings that a trace has baked in, besides its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from graphrt.compile.errors import RetraceError
from graphrt.compile.private_torch.guards import Guards, function_modes, hooks_of_all_modules
from graphrt.compile.trace._side_effects import Rewritten
from graphrt.compile.trace.parameters import Parameters
from graphrt.compile.trace.subject import Method, kind_of, kind_text, method_of, value_text
from graphrt.core.base.thread_mode import without_free_keys
from graphrt.trust.checks import Ambient

_AS_TRACED = "what the trace has baked in"

_CHANGE_EARLIER = (
    "set it before compiling, compile a new instance of the module, or make it a tensor that is "
    "written in place"
)
# Not "compile under it": Dynamo traces nothing under a dispatch mode.
_SAME_SETTINGS = "call it under the settings of the trace"


class Outside:
    """Checks that all state besides a call's arguments is as it was at the trace.

    `guards` are Dynamo's. They miss the `methods` of classes, places that the forward only writes
    (`rewritten`), and the defaults of `parameters`, as the traced call was given all arguments.
    `inputs` returns the graph's inputs of a call, by Dynamo's code; `unnamed` are those of the
    trace that are neither arguments nor weights. With `gathered_each_call`, Dynamo's code gathers
    these in each call, so another tensor of the same kind will do.
    """

    def __init__(
        self,
        guards: Guards,
        rewritten: Sequence[Rewritten],
        parameters: Parameters,
        device_type: str,
        methods: Sequence[Method],
        inputs: Callable[..., list[Any]],
        unnamed: Mapping[int, torch.Tensor],
        *,
        gathered_each_call: bool,
    ) -> None:
        self._guards = guards
        self._rewritten = tuple(rewritten)
        self._parameters = parameters
        self._methods = tuple(methods)
        # At the trace: settings of torch, the number of function modes, hooks of all modules.
        self._ambient = Ambient(device_type)
        self._modes = function_modes()
        self._hooks = hooks_of_all_modules()
        self._inputs = inputs
        # Index of a graph's input -> the tensor, and its kind at the trace.
        self._unnamed = dict(unnamed)
        self._kinds = {index: kind_of(tensor) for index, tensor in unnamed.items()}
        self._gathered_each_call = gathered_each_call
        # The checks of later traces that gave the same code: see `accept`.
        self._accepted: list[Outside] = []

    def accept(self, other: Outside) -> None:
        """Take the state of another trace too, for which the code is the same."""
        self._accepted.append(other)

    def check_settings(self) -> None:
        """Raise `RetraceError` if a setting of the process that operators depend on has changed;
        call it without gradients. It takes a fraction of a microsecond."""
        if not next(self._ambient.looks) and (changes := self._ambient.differences()):
            text = changes[0].replace("capture", "the trace")
            raise _changed(changes[0].partition(":")[0], text, advice=_SAME_SETTINGS)
        if function_modes() != self._modes:
            text = f"{function_modes()} of them, {self._modes} at the trace"
            raise _changed("torch function modes", text, advice=_SAME_SETTINGS)

    def check_state(
        self, arguments: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Raise `RetraceError` if state that Python can change is not as it was at the trace.

        `arguments` are those of a call by the names of parameters, `args` and `kwargs` the same.
        """
        try:
            self._check_state(arguments, args, kwargs)
        except RetraceError:
            if not any(each.holds(arguments, args, kwargs) for each in self._accepted):
                raise

    def holds(
        self, arguments: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> bool:
        """Whether `check_state` raises nothing."""
        try:
            self.check_state(arguments, args, kwargs)
        except RetraceError:
            return False
        return True

    def _check_state(
        self, arguments: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        hold = partial(self._guards.hold, arguments)
        # A capture on the CPU includes a dispatch key. A guard on a tensor's keys (Whisper's cache)
        # would take it for a change of the tensor.
        if not hold() and not without_free_keys(hold):
            name, got, was, guard = self._guards.broken(arguments)
            # Equal texts, such as those of two functions, say nothing: then the guard does.
            if got == was:
                was = _AS_TRACED if "___" in guard else guard
            raise _changed(name or "the module", got, was or _AS_TRACED)
        for value in self._rewritten:
            if not value.holds():
                raise _changed(value.name, value_text(value.now()), value_text(value.value))
        if hooks_of_all_modules() != self._hooks:
            raise _changed("what is hooked into all modules", "other hooks")
        self._check_methods()
        if changed := self._parameters.changed_default():
            name, now, before = changed
            raise _changed(f"the default of {name}", value_text(now), value_text(before))
        if self._unnamed:
            self._check_unnamed(args, kwargs)

    def _check_methods(self) -> None:
        for owner, name, function, code in self._methods:
            now = method_of(owner, name)
            if now is not function or function.__code__ is not code:
                raise _changed(f"{owner.__qualname__}.{name}", "another function")

    def _check_unnamed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        now = self._inputs(*args, **kwargs)
        for index, tensor in self._unnamed.items():
            new = now[index]
            if new is not tensor and not self._gathered_each_call:
                raise _changed("a tensor of no module", "another one than at the trace")
            if not isinstance(new, torch.Tensor):
                raise _changed("a tensor that the forward reads", type(new).__name__)
            if (kind := kind_of(new)) != self._kinds[index]:
                raise _changed("a tensor that the forward reads", kind_text(kind))
            self._unnamed[index] = new


def _changed(
    name: str, got: str, expected: str = _AS_TRACED, *, advice: str = _CHANGE_EARLIER
) -> RetraceError:
    return RetraceError(
        f"{name} is not as it was when the code was traced",
        input=name,
        got=got,
        expected=expected,
        advice=advice,
    )
