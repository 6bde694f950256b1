"""One Dynamo trace of a forward, with dynamic batch dimensions."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import fx

from graphrt.compile.errors import TraceError
from graphrt.compile.locks import process_lock
from graphrt.compile.private_torch.guards import GuardFilter, Guards, all_guarded, names_read
from graphrt.compile.private_torch.traces import (
    errors_told_once,
    mark_dynamic,
    mark_unbacked,
    new_code_shown,
    size_oblivious,
    torch_check,
    trace_facts,
)
from graphrt.compile.trace._side_effects import Rewritten, assignments
from graphrt.compile.trace.dims import DynamicDims
from graphrt.compile.trace.parameters import Leaf, Parameters
from graphrt.compile.trace.sizes import placeholders, value_of
from graphrt.compile.trace.subject import value_text
from graphrt.compile.trace.user_lines import explained
from graphrt.core.base.errors import GraphRTError

# Dynamo's hooks for bytecode are process-wide; a trace is rare enough to take turns.
_lock = process_lock()
# How many functions were traced: each gets the next number in its name.
_traces = 0


@dataclass(frozen=True)
class Traced:
    """The result of one trace.

    `graph` takes arguments, sizes and weights, in Dynamo's order. `transformed` is Dynamo's code in
    place of the forward's: it gathers those, calls the graph, and builds what the forward returns.
    `conditions` are the relations of sizes that the trace relied on, each with the line of the
    forward that decides by it. `assigned` are the attributes
    and containers that the forward assigns to, `rewritten` the places that keep their old value.
    `codes` are the code objects that Dynamo inlined. `size_places` maps each symbol of `conditions`
    to Dynamo's name of a tensor, and a dimension. `guards` are those on state that Python can
    change.
    """

    graph: fx.GraphModule
    transformed: CodeType
    conditions: Mapping[Any, str]
    assigned: tuple[str, ...]
    rewritten: tuple[Rewritten, ...]
    codes: tuple[CodeType, ...]
    size_places: Mapping[Any, tuple[str, int]]
    guards: Guards
    _function: FunctionType
    """The traced function, with its own copy of the globals that `transformed` reads."""
    _graph_name: str
    """The global name under which `transformed` calls the graph."""

    def inputs_of(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The inputs that such a call gives to the graph. The call ends before the graph runs."""
        graph_inputs: list[Any] = []

        def stop_at_graph(*inputs: Any) -> tuple[Any, ...]:
            graph_inputs.extend(inputs)
            raise _Stop

        with contextlib.suppress(_Stop):
            self.forward_around(stop_at_graph)(*args, **kwargs)
        return graph_inputs

    def forward_around(self, run: Callable[..., Sequence[Any]]) -> FunctionType:
        """The forward, with `run` called in place of its graph."""
        function = self._function
        forward = FunctionType(
            self.transformed,
            {**function.__globals__, self._graph_name: run},
            "forward",
            function.__defaults__,
            function.__closure__,
        )
        forward.__kwdefaults__ = function.__kwdefaults__
        return forward


class _Stop(BaseException):
    """Ends the traced call before its graph runs."""


def trace(
    call: Callable[..., Any],
    parameters: Parameters,
    arguments: inspect.BoundArguments,
    leaves: Sequence[Leaf],
    dims: DynamicDims,
    dynamic_shapes: str,
) -> Traced:
    """Trace `call` with example `arguments`, whose parts are `leaves`; runs nothing.

    Raises `TraceError` where the forward is not one graph, and where a batch dimension turns out
    to be a constant.
    """
    unbacked = dynamic_shapes == "unbacked"
    equalities = _mark(leaves, dims, unbacked=unbacked)
    backend = _Backend(_function(call, parameters, equalities))
    compiled = torch.compile(
        backend.function,
        backend=backend,
        fullgraph=True,
        dynamic=False,
        options={"guard_filter_fn": backend.kept_guards},
    )
    with _lock, _tracing(backend.keep_code, oblivious=not unbacked):
        try:
            compiled(*arguments.args, **arguments.kwargs)
        except _Stop:
            pass
        except GraphRTError:
            raise
        except Exception as error:
            raise explained(error, dynamic_shapes, any_size=bool(dims)) from error
    return backend.traced(arguments.arguments)


class _Backend:
    """Dynamo's backend for one trace of `function`: keeps the graph and runs none of it."""

    def __init__(self, function: FunctionType) -> None:
        self.function = function
        # Dynamo calls it with the guards of the trace.
        self.kept_guards = GuardFilter(value_text)
        # Dynamo's graph, and its code in place of the function's; None until it has made them.
        self._graph: fx.GraphModule | None = None
        self._code: CodeType | None = None

    def __call__(self, graph: fx.GraphModule, inputs: object) -> Callable[..., Any]:
        self._graph = graph
        _return_inputs(graph)
        self.kept_guards.read = names_read(graph)
        self._assigned, self._rewritten = assignments()
        self._facts = trace_facts()
        return _stop

    def keep_code(self, old: CodeType, new: CodeType) -> None:
        if old is self.function.__code__:
            self._code = new

    def traced(self, arguments: Mapping[str, Any]) -> Traced:
        """The result, once the trace has ended."""
        if self._graph is None or self._code is None:
            raise TraceError(
                "nothing was traced: the forward issues no operator",
                advice="compile the module that computes",
            )
        names = [n for n in self._code.co_names if n.startswith("__compiled_fn")]
        if len(names) != 1:
            raise TraceError(
                "the traced code calls no single graph",
                got=names,
                expected="one compiled function",
                advice="a torch of constraints.txt, with which this graphrt was tested",
            )
        function = self.function
        guards = Guards(function, self.kept_guards, arguments)
        # With a copy of the globals: Dynamo deletes its names from them when it forgets the trace.
        own_function = FunctionType(
            function.__code__, dict(function.__globals__), "forward", function.__defaults__
        )
        own_function.__kwdefaults__ = function.__kwdefaults__
        return Traced(
            self._graph,
            self._code,
            self._facts.conditions,
            self._assigned,
            self._rewritten,
            self._facts.codes,
            self._facts.places,
            guards,
            own_function,
            names[0],
        )


def _return_inputs(graph: fx.GraphModule) -> None:
    """Have the graph return an input itself in place of the result of an in-place operator on it.
    Without this `self.count += 1` would store a result of the graph in the attribute."""
    inputs = {id(value_of(node)): node for node in placeholders(graph)}
    output = next(iter(reversed(graph.graph.nodes)))
    output.args = (fx.map_arg(output.args[0], lambda node: inputs.get(id(value_of(node)), node)),)
    graph.recompile()


def _stop(*_: object) -> Any:
    raise _Stop


def _mark(leaves: Sequence[Leaf], dims: DynamicDims, *, unbacked: bool) -> list[str]:
    """Mark the batch dimensions as dynamic for Dynamo. Returns equalities, as Python, by which all
    dimensions of one axis get one symbol.

    Unbacked dimensions of one axis share a symbol by their mark, unless they have an offset from it
    (`axis.extra`).
    """
    # Name of an axis -> its first dimension, as Python.
    first: dict[str, str] = {}
    equalities = []
    for leaf in leaves:
        for dim, axis in dims.of(leaf).items():
            shared = unbacked and not axis.extra
            if unbacked:
                mark_unbacked(leaf.value, dim, axis.name if shared else None)
            else:
                mark_dynamic(leaf.value, dim)
            offset = f" - {axis.extra}" if axis.extra else ""
            here = f"{leaf.path}.size({dim}){offset}"
            first_one = first.setdefault(axis.name, here)
            if first_one != here and not shared:
                equalities.append(f"{here} == {first_one}")
    return equalities


def _function(
    call: Callable[..., Any], parameters: Parameters, equalities: Sequence[str]
) -> FunctionType:
    """`call` wrapped in new code, as Dynamo keeps its traces by code object."""
    global _traces
    _traces += 1
    # Numbered: code objects of equal source are equal, and Dynamo must not know this one.
    name = f"forward_{_traces}"
    lines = [f"def {name}{parameters.header()}:"]
    lines += [f"    _check({equality})" for equality in equalities]
    lines.append(f"    return _call({parameters.forwarding()})")
    namespace: dict[str, Any] = {
        "_call": call,
        "_check": torch_check,
        **parameters.defaults(),
    }
    file, source = f"<graphrt trace {_traces}>", "\n".join(lines)
    # Dynamo (2.11) wraps a function without source in a frame, the same one for all.
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), namespace)
    function = namespace[name]
    assert isinstance(function, FunctionType)
    return function


@contextmanager
def _tracing(hook: Callable[[CodeType, CodeType], None], *, oblivious: bool) -> Iterator[None]:
    """With `oblivious`, a branch of the forward on a size of 1 becomes a condition of the trace;
    operators are traced for larger sizes."""
    with ExitStack() as stack:
        # Dynamo would trace a profiler in Python, such as that of a trial, in the forward's place.
        stack.callback(sys.setprofile, sys.getprofile())
        sys.setprofile(None)
        stack.enter_context(errors_told_once())
        stack.enter_context(new_code_shown(hook))
        stack.enter_context(torch.no_grad())
        stack.enter_context(all_guarded())
        if oblivious:
            stack.enter_context(size_oblivious())
        yield
