"""One Dynamo trace of a forward, with dynamic batch dimensions."""

from __future__ import annotations

import contextlib
import inspect
import linecache
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
    trace_so_far,
)
from graphrt.compile.trace._side_effects import Rewritten, assignments
from graphrt.compile.trace.dims import DynamicDims
from graphrt.compile.trace.parameters import Leaf, Parameters
from graphrt.compile.trace.user_lines import explained
from graphrt.core.base.errors import GraphRTError

# Dynamo's hooks for bytecode are process-wide; a trace is rare enough to take turns.
_lock = process_lock()
_traces = 0


@dataclass(frozen=True)
class Traced:
    """The result of one trace.

    `graph` takes arguments, sizes and weights, in an order of Dynamo's own. `transformed` is the
    code that Dynamo leaves of the forward: it gathers those, calls the graph, and builds what the
    forward returns. `conditions` are the relations of sizes that the trace relied on. `assigned`
    are the attributes and containers that the forward assigns to, `rewritten` the places that it
    leaves as they were. `codes` is what Dynamo inlined.
    `size_places` says where the symbols of `conditions` are in the arguments: Dynamo's name of a
    tensor, and a dimension. `guards` are those on what Python can change.
    """

    graph: fx.GraphModule
    transformed: CodeType
    conditions: tuple[Any, ...]
    assigned: tuple[str, ...]
    rewritten: tuple[Rewritten, ...]
    codes: tuple[CodeType, ...]
    size_places: Mapping[Any, tuple[str, int]]
    guards: Guards
    _function: FunctionType
    _graph_name: str

    def inputs_of(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The graph's inputs in such a call, which ends there."""
        seen: list[Any] = []

        def look(*inputs: Any) -> tuple[Any, ...]:
            seen.extend(inputs)
            raise _Stop

        with contextlib.suppress(_Stop):
            self.forward_around(look)(*args, **kwargs)
        return seen

    def forward_around(self, run: Callable[..., Sequence[Any]]) -> FunctionType:
        """The forward with `run`, which takes and returns what the graph does, in its place."""
        function = self._function
        made = FunctionType(
            self.transformed,
            {**function.__globals__, self._graph_name: run},
            "forward",
            function.__defaults__,
            function.__closure__,
        )
        made.__kwdefaults__ = function.__kwdefaults__
        return made


class _Stop(BaseException):
    """Ends the call that traced: nothing of it shall run."""


def trace(
    call: Callable[..., Any],
    parameters: Parameters,
    arguments: inspect.BoundArguments,
    leaves: Sequence[Leaf],
    dims: DynamicDims,
    dynamic_shapes: str,
) -> Traced:
    """Trace `call` with example `arguments`, of which `leaves` are the parts; runs nothing.

    Raises `TraceError` where the forward is not one graph, and where a batch dimension turns out
    to be a constant.
    """
    unbacked = dynamic_shapes == "unbacked"
    equalities = _mark(leaves, dims, unbacked=unbacked)
    seen = _Backend(_function(call, parameters, equalities))
    compiled = torch.compile(
        seen.function,
        backend=seen,
        fullgraph=True,
        dynamic=False,
        options={"guard_filter_fn": seen.kept_guards},
    )
    with _lock, _tracing(seen.keep_code, oblivious=not unbacked):
        try:
            compiled(*arguments.args, **arguments.kwargs)
        except _Stop:
            pass
        except GraphRTError:
            raise
        except Exception as error:
            raise explained(error, dynamic_shapes, any_size=bool(dims)) from error
    return seen.traced(arguments.arguments)


class _Backend:
    """Dynamo's backend for one trace of `function`: keeps the graph and runs none of it."""

    def __init__(self, function: FunctionType) -> None:
        self.function = function
        self.kept_guards = GuardFilter()
        self._graph: fx.GraphModule | None = None
        self._code: CodeType | None = None

    def __call__(self, graph: fx.GraphModule, inputs: object) -> Callable[..., Any]:
        self._graph = graph
        self.kept_guards.read = names_read(graph)
        self._assigned, self._rewritten = assignments()
        self._so_far = trace_so_far()
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
        # Dynamo takes its names out of the globals when it forgets the trace.
        kept = FunctionType(
            function.__code__, dict(function.__globals__), "forward", function.__defaults__
        )
        kept.__kwdefaults__ = function.__kwdefaults__
        return Traced(
            self._graph,
            self._code,
            self._so_far.conditions,
            self._assigned,
            self._rewritten,
            self._so_far.codes,
            self._so_far.places,
            guards,
            kept,
            names[0],
        )


def _stop(*_: object) -> Any:
    raise _Stop


def _mark(leaves: Sequence[Leaf], dims: DynamicDims, *, unbacked: bool) -> list[str]:
    """Mark the batch dimensions; returns the equalities that make those of one axis one symbol."""
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
    """`call` as a function of its own code: Dynamo keeps what it knows with the code."""
    global _traces
    _traces += 1
    # Code objects of equal source are equal, wherever they are from; this one is new to Dynamo.
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
    # Dynamo (2.11) wraps what has no source, and all in the same frame.
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), namespace)
    function = namespace[name]
    assert isinstance(function, FunctionType)
    return function


@contextmanager
def _tracing(hook: Callable[[CodeType, CodeType], None], *, oblivious: bool) -> Iterator[None]:
    """`oblivious`: symbols may be 1, so that a branch that asks for it is a condition; operators do
    not ask."""
    with ExitStack() as stack:
        stack.enter_context(errors_told_once())
        stack.enter_context(new_code_shown(hook))
        stack.enter_context(torch.no_grad())
        stack.enter_context(all_guarded())
        if oblivious:
            stack.enter_context(size_oblivious())
        yield
