"""The call that runs all pieces in order, as straight-line Python."""

from __future__ import annotations

import keyword
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import fx

from graphrt.compile.errors import RetraceError
from graphrt.compile.split.graph import Piece, attribute_of
from graphrt.compile.split.identity import target_name
from graphrt.compile.trace.interface import Argument, Interface, Output, Weight
from graphrt.compile.trace.parameters import Parameters
from graphrt.compile.trace.sizes import is_number, placeholders
from graphrt.compile.trace.subject import Kind, Subject, kind_of, kind_text


@dataclass(frozen=True)
class Stitched:
    """The generated function that runs all pieces, and its source. `weights` maps a weight's name
    in the module to its global name in the function; `kinds` maps the global name to the dtype,
    shape, strides and device that the code relies on."""

    function: FunctionType
    source: str
    weights: Mapping[str, str]
    kinds: Mapping[str, Kind]

    def rebind(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Let the function use these weights. Raises `RetraceError` if one has another kind, is
        gone, or is no longer tied to the weight that it was tied to at compilation."""
        namespace = self.function.__globals__
        bound: dict[str, tuple[str, torch.Tensor]] = {}
        for path, name in self.weights.items():
            new = weights.get(path)
            if new is None:
                raise _other_weight(path, "nothing", kind_text(self.kinds[name]))
            self._check(path, name, new)
            first, other = bound.setdefault(name, (path, new))
            if other is not new:
                raise _other_weight(path, "a tensor of its own", f"the same as {first}")
        namespace.update({name: new for name, (_, new) in bound.items()})

    def check_weights(self) -> None:
        """Raise `RetraceError` if a weight in use has become one of another kind: code that was
        compiled for float32 would read memory that is not there. 0.5 us a weight."""
        namespace = self.function.__globals__
        for path, name in self.weights.items():
            self._check(path, name, namespace[name])

    def _check(self, path: str, name: str, weight: torch.Tensor) -> None:
        if kind_of(weight) != self.kinds[name]:
            raise _other_weight(path, kind_text(kind_of(weight)), kind_text(self.kinds[name]))

    def in_use(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The `weights` that the function reads, and its own constants."""
        bound = set(self.weights.values())
        constants = {
            f"constant {name}": value
            for name, value in self.function.__globals__.items()
            if name not in bound and isinstance(value, torch.Tensor)
        }
        return {**constants, **{name: weights[name] for name in self.weights if name in weights}}


def _other_weight(name: str, got: str, expected: str) -> RetraceError:
    return RetraceError(
        f"the weight {name} is another one than was compiled for",
        input=name,
        got=got,
        expected=expected,
        advice="compile a new instance of the module",
    )


def stitch(
    interface: Interface | None,
    graph: fx.GraphModule,
    pieces: Sequence[Piece],
    calls: Sequence[Callable[..., Any]],
    subject: Subject,
) -> Stitched:
    """Generate the function that calls `calls`, one for each piece.

    With an `interface` it has the parameters of the subject's forward, and holds its weights;
    without, it takes and returns what the graph does.
    """
    parameters = subject.parameters
    writer = _Writer(graph, pieces, parameters if interface else None)
    if interface is None:
        writer.take_placeholders()
    else:
        writer.take_parameters(interface, parameters, subject.weights())
    for piece, call in zip(pieces, calls, strict=True):
        writer.call_piece(piece, call)
    writer.write_return(interface)
    return writer.finish(f"<graphrt {type(subject.module).__name__} {id(subject.module)}>")


class _Writer:
    """Writes the lines of the function that runs all pieces, and the globals that they name."""

    def __init__(
        self, graph: fx.GraphModule, pieces: Sequence[Piece], parameters: Parameters | None
    ) -> None:
        self._graph = graph
        # Global name of the function -> its value: pieces, weights, constants.
        self._globals: dict[str, Any] = {}
        # Name of a weight in the module -> its global name.
        self._weights: dict[str, str] = {}
        # Names that no new global or local may take.
        self._reserved = {piece.name for piece in pieces}
        self._reserved |= set(parameters.names) if parameters else set()
        # Node -> the name of its value in the function.
        self._names: dict[fx.Node, str] = {}
        self._lines: list[str] = []
        self._signature = ""
        # Node -> the index of the last piece that takes or gives it.
        self._last_use = _last_uses(pieces)
        # Nodes that the forward returns: no line deletes them.
        self._returned_nodes: set[fx.Node] = set()
        output = next(iter(reversed(graph.graph.nodes)))
        # The graph's results: nodes and constants.
        self._outputs: Sequence[Any] = output.args[0]
        self._returned_nodes.update(output.all_input_nodes)
        self._read_nodes = {n for piece in pieces for n in piece.inputs} | self._returned_nodes

    def take_placeholders(self) -> None:
        """Let the function take the inputs of the graph, as they are."""
        nodes = placeholders(self._graph)
        for node in nodes:
            self._names[node] = self._fresh(node.name)
        self._signature = f"({', '.join(self._names[n] for n in nodes)})"
        self._take_attributes()

    def take_parameters(
        self,
        interface: Interface,
        parameters: Parameters,
        weights: Mapping[str, torch.Tensor],
    ) -> None:
        """Let the function take the forward's arguments. Each input of the graph is then a global
        (a weight), or read from an argument by the Python that `interface` has for it."""
        paths_of: dict[int, list[str]] = {}
        for path, weight in weights.items():
            paths_of.setdefault(id(weight), []).append(path)
        self._signature = parameters.header()
        self._globals.update(parameters.defaults())
        nodes = placeholders(self._graph)
        for node, source in zip(nodes, interface.inputs, strict=True):
            if isinstance(source, Weight):
                paths = paths_of.get(id(source.tensor), [])
                name = paths[0] if paths else node.name
                self._names[node] = self._constant(name, source.tensor)
                self._weights.update(dict.fromkeys(paths, self._names[node]))
            elif not is_number(node):
                self._names[node] = source
            elif node in self._used_numbers():
                self._names[node] = self._fresh(node.name)
                self._lines.append(f"{self._names[node]} = {source}")
        self._take_attributes()

    def call_piece(self, piece: Piece, call: Callable[..., Any]) -> None:
        self._globals[piece.name] = call
        arguments = ", ".join(self._names[n] for n in piece.inputs)
        for node in piece.outputs:
            self._names[node] = self._fresh(node.name)
        results = ", ".join(self._names[n] for n in piece.outputs)
        self._lines.append(f"{results}{' = ' if results else ''}{piece.name}({arguments})")
        computed = (
            n for n in (*piece.inputs, *piece.outputs) if n.op not in ("placeholder", "get_attr")
        )
        done = [
            n
            for n in computed
            if self._last_use.get(n) == piece.index and n not in self._returned_nodes
        ]
        if done:
            # The pieces that follow may use memory that nothing reads any more.
            self._lines.append(f"del {', '.join(self._names[n] for n in done)}")

    def write_return(self, interface: Interface | None) -> None:
        self._compute_numbers()
        outputs = [self._text(value) for value in self._outputs]
        if interface is None:
            self._lines.append(f"return ({', '.join(outputs)}{',' if len(outputs) == 1 else ''})")
        else:
            self._lines.append(f"return {self._result_text(interface.result, outputs)}")

    def finish(self, label: str) -> Stitched:
        """The function of all lines so far; `label` is the name of its file in tracebacks."""
        body = "\n".join(f"    {line}" for line in self._lines)
        source = f"def forward{self._signature}:\n{body}\n"
        namespace = dict(self._globals)
        exec(compile(source, label, "exec"), namespace)
        # So that tracebacks show the lines.
        linecache.cache[label] = (len(source), None, source.splitlines(keepends=True), label)
        kinds = {name: kind_of(namespace[name]) for name in self._weights.values()}
        return Stitched(namespace["forward"], source, self._weights, kinds)

    def _take_attributes(self) -> None:
        for node in self._graph.graph.nodes:
            if node.op == "get_attr" and node in self._read_nodes:
                value = attribute_of(self._graph, str(node.target))
                self._names[node] = self._constant(node.name, value)

    def _used_numbers(self) -> set[fx.Node]:
        """Numbers that a piece takes or the forward returns, and the numbers these depend on."""
        used = {n for n in self._read_nodes if is_number(n)}
        stack = list(used)
        while stack:
            for n in stack.pop().all_input_nodes:
                if n not in used and is_number(n):
                    used.add(n)
                    stack.append(n)
        return used

    def _compute_numbers(self) -> None:
        used = self._used_numbers()
        for node in self._graph.graph.nodes:
            if node in used and node not in self._names:
                function = self._constant(target_name(node.target).rpartition(".")[2], node.target)
                arguments = [self._text(a) for a in node.args]
                arguments += [f"{key}={self._text(a)}" for key, a in node.kwargs.items()]
                self._names[node] = self._fresh(node.name)
                self._lines.append(f"{self._names[node]} = {function}({', '.join(arguments)})")

    def _result_text(self, value: Any, outputs: Sequence[str]) -> str:
        if isinstance(value, Output):
            return outputs[value.index]
        if isinstance(value, Argument):
            return value.path
        if isinstance(value, Weight):
            return self._constant("weight", value.tensor)
        if isinstance(value, tuple):
            inside = ", ".join(self._result_text(v, outputs) for v in value)
            return f"({inside}{',' if len(value) == 1 else ''})"
        if isinstance(value, list):
            return f"[{', '.join(self._result_text(v, outputs) for v in value)}]"
        if isinstance(value, dict):
            items = (
                f"{self._literal(k)}: {self._result_text(v, outputs)}" for k, v in value.items()
            )
            return "{" + ", ".join(items) + "}"
        return self._literal(value)

    def _text(self, value: Any) -> str:
        return self._names[value] if isinstance(value, fx.Node) else self._literal(value)

    def _literal(self, value: Any) -> str:
        if value is None or type(value) in (int, str, bool):
            return repr(value)
        return self._constant("constant", value)

    def _constant(self, name: str, value: Any) -> str:
        """A global name for a value that begins with `name`; the same one for the same value."""
        name = "".join(c if c.isalnum() else "_" for c in name)
        for taken, other in self._globals.items():
            if other is value and taken.startswith(name):
                return taken
        name = self._fresh(name)
        self._globals[name] = value
        return name

    def _fresh(self, name: str) -> str:
        """`name` as an identifier that nothing else has, which is reserved by this call."""
        while name in self._reserved or keyword.iskeyword(name) or not name.isidentifier():
            name = f"_{name}" if not name[:1].isalpha() and name[:1] != "_" else f"{name}_"
        self._reserved.add(name)
        return name


def _last_uses(pieces: Sequence[Piece]) -> dict[fx.Node, int]:
    last: dict[fx.Node, int] = {}
    for piece in pieces:
        last.update(dict.fromkeys((*piece.outputs, *piece.inputs), piece.index))
    return last
