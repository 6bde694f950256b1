"""Untraced code that a graph calls: operators, functions, Triton kernels.

Their Python functions are described as `Values` does. Bodies that only the dispatcher knows, such
as a composite operator's, are run with the trace's fake tensors, and every function that is called
meanwhile is described with the values of its globals, its closure and its arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import fx

from graphrt.compile.cache.key.code import is_library, is_library_file, is_torchs
from graphrt.compile.cache.key.values import Values
from graphrt.compile.private_torch.operators import is_higher_order, overload_name, overloads
from graphrt.compile.private_torch.registered import (
    has_compiled_kernels,
    ignoring_new_sizes,
    is_torchs_own,
    operators_called,
    python_calls,
    python_functions,
    registrations,
    tables,
    triton_call,
)
from graphrt.compile.private_torch.traces import errors_told_once
from graphrt.compile.trace.sizes import value_of
from graphrt.core.base.texts import error_line
from graphrt.core.replay.recording import frozen_gc

_TENSOR = torch.Tensor
_WATCHING = ("graphrt.core.", "graphrt.trust.", "graphrt.compile.")


def called_code(graph: fx.GraphModule, values: Values) -> dict[str, list[str]]:
    """Digests of the operators and functions that `graph` calls and Dynamo did not trace, by name,
    in the order of the graph: two functions may share a name."""
    called = _Called(values)
    for each in graph.modules():
        if isinstance(each, fx.GraphModule):
            for node in each.graph.nodes:
                called.add(node, outer=each is graph)
    for name, function in tables():
        if not is_torchs(function):
            called.digests[name] = [values.of(function)]
    return called.digests


class _Called:
    def __init__(self, values: Values) -> None:
        self._values = values
        # Name of an operator, function, argument or attribute -> texts of all that have it.
        self.digests: dict[str, list[str]] = {}
        # Operators that are described already, and functions that were run with fake tensors.
        self._operators: set[Any] = set()
        self._watched: set[Any] = set()

    def _add(self, name: str, *described: str) -> None:
        self.digests.setdefault(name, []).extend(described)

    def add(self, node: fx.Node, *, outer: bool) -> None:
        target: Any = node.target
        if node.op == "get_attr":
            self._attribute(node, outer=outer)
        elif node.op == "call_method":
            target = getattr(_TENSOR, str(target), None)
            if isinstance(target, FunctionType) and not is_library(target):
                self._function(node, target)
        elif node.op == "call_function":
            self._arguments(node)
            if is_higher_order(target):
                self._triton(node)
            elif any(overload_name(each) for each in overloads(target)):
                for each in overloads(target):
                    self._operator(each)
                self._watch(node, target)
            elif isinstance(target, FunctionType) or hasattr(target, "__dict__"):
                self._function(node, target)

    def _function(self, node: fx.Node, function: Any) -> None:
        module = getattr(function, "__module__", None) or ""
        if is_torchs(function):
            return
        name = getattr(function, "__qualname__", type(function).__qualname__)
        self._add(f"{module}.{name}", self._values.of(function))
        self._watch(node, function)

    def _operator(self, operator: Any) -> None:
        if operator in self._operators or is_torchs_own(operator):
            return
        self._operators.add(operator)
        described = [self._values.of(each) for each in python_functions(operator)]
        if has_compiled_kernels(operator):
            described += self._libraries(operator)
        self._add(str(operator), *registrations(operator), *described)

    def _libraries(self, operator: Any) -> list[str]:
        """Digests of the extensions whose files contain an operator's name: one registers it."""
        short = str(overload_name(operator)).rpartition("::")[2].encode()
        described = [
            f"{Path(file).name} {self._values.file(file)}"
            for file in sorted(_extensions())
            if short in Path(file).read_bytes()
        ]
        if not described:
            self._values.unknown.append(f"the library of {operator}")
        return described

    def _triton(self, node: fx.Node) -> None:
        call = triton_call(node)
        if call is not None:
            kernel, constants = call[1]
            name = getattr(kernel, "__name__", type(kernel).__name__)
            self._add(f"triton {name}", self._values.of(kernel), self._values.of(constants))

    def _attribute(self, node: fx.Node, *, outer: bool) -> None:
        # The tensors of the graph itself are inputs of pieces; those of inner graphs are not.
        value: Any = node.graph.owning_module
        for name in str(node.target).split("."):
            value = getattr(value, name)
        if not isinstance(value, fx.GraphModule) and not (outer and isinstance(value, _TENSOR)):
            self._add(f"attribute {node.target}", self._values.of(value))

    def _arguments(self, node: fx.Node) -> None:
        for value in fx.node.map_arg([*node.args, *node.kwargs.values()], lambda _: None):
            for each in _parts(value):
                if each is not None and not isinstance(each, (bool, int, float, str)):
                    self._add(f"argument of {node.name}", self._values.of(each))

    def _watch(self, node: fx.Node, target: Any) -> None:
        """Run the node's function with fake tensors, and describe every function that it calls."""
        from_torch = all(is_torchs_own(each) for each in overloads(target) if overload_name(each))
        # torch's own operators are not run: its version is in the key.
        if target in self._watched or (
            from_torch and any(overload_name(each) for each in overloads(target))
        ):
            return
        self._watched.add(target)
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value_of)
        modes = (getattr(each, "fake_mode", None) for each in _parts((args, kwargs)))
        mode = next((each for each in modes if each is not None), None)
        described: list[str] = []

        def note_frame(running: FrameType) -> None:
            code = running.f_code
            # graphrt's own watches, which are on in warm-ups, do not affect compiled code.
            module = str(running.f_globals.get("__name__"))
            generated = code.co_filename.startswith("<") and _is_generated_for_others(module)
            if not (generated or is_library_file(code.co_filename) or module.startswith(_WATCHING)):
                described.append(self._values.frame(code, running.f_globals, running.f_locals))

        try:
            with ExitStack() as stack:
                stack.enter_context(errors_told_once())
                stack.enter_context(torch.no_grad())
                if mode is not None:
                    if mode.shape_env is not None:
                        stack.enter_context(ignoring_new_sizes(mode))
                    stack.enter_context(mode)
                calls = stack.enter_context(operators_called())
                # A finalizer that a collection runs would count as called by the node.
                stack.enter_context(frozen_gc())
                stack.enter_context(python_calls(note_frame))
                target(*args, **kwargs)
        except Exception as error:
            self._values.unknown.append(f"what {target} calls: {error_line(error)}")
            return
        self._add(f"called by {getattr(target, '__qualname__', target)}", *sorted(set(described)))
        for each in calls:
            self._operator(each)


def _is_generated_for_others(module: str) -> bool:
    """Whether code without a file is of a named tuple, or of torch's data classes: whether that
    runs depends on what torch has cached."""
    loaded = sys.modules.get(module)
    return module.startswith("namedtuple_") or (loaded is not None and is_library(loaded))


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, slice):
        value = [value.start, value.stop, value.step]
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _parts(each)
    else:
        yield value


def _extensions() -> set[str]:
    """The files of libraries loaded by `torch.ops`, and of extensions that are no library's."""
    files = set(torch.ops.loaded_libraries)
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or ""
        if file.endswith((".so", ".pyd", ".dylib")) and not is_library(module):
            files.add(file)
    return {each for each in files if Path(each).is_file()}
