"""Which pieces can share code: a text of each piece that is equal for these, and its hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch
from torch import fx

from graphrt.compile.cache.key.code import is_library
from graphrt.compile.cache.key.values import Values
from graphrt.compile.private_torch.operators import (
    inner_tensors,
    operator_names,
    storage_identity,
    tensor_text,
)
from graphrt.compile.private_torch.registered import triton_call
from graphrt.compile.split.graph import attribute_of
from graphrt.compile.trace.sizes import value_of

_PLAIN = (str, int, float, complex, bool, type(None), type(Ellipsis))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def fingerprint(graph: fx.GraphModule) -> str:
    """A hash that is equal for pieces that one compiled function can serve.

    It is made of the operators in their order, their constants, and the properties of the inputs:
    shapes, strides, dtypes, devices, and which of them share memory. Names do not matter.
    """
    return hashlib.sha256("\n".join(normalised(graph)).encode()).hexdigest()


def normalised(graph: fx.GraphModule, nodes: Iterable[fx.Node] | None = None) -> list[str]:
    """The lines that are hashed. `nodes` are those of the graph, with its inputs in the order in
    which they are numbered."""
    numbers: dict[fx.Node, str] = {}
    storages: dict[int, int] = {}
    lines = []
    for node in nodes or graph.graph.nodes:
        numbers[node] = name = f"%{len(numbers)}"
        if node.op == "placeholder":
            lines.append(f"{name} = input {_described(value_of(node), storages)}")
        elif node.op == "output":
            # Their devices too: of a piece without inputs nothing else tells the current one.
            results = {n: value_of(n) for n in node.all_input_nodes}
            kinds = (tensor_text(v) for v in results.values() if isinstance(v, torch.Tensor))
            lines.append(f"return {_argument(node.args[0], numbers)}: {'; '.join(kinds)}")
        elif node.op == "get_attr":
            lines.append(f"{name} = {_attribute(graph, str(node.target))}")
        else:
            kwargs, kernel = triton_call(node) or (node.kwargs, None)
            args = _argument((node.args, kwargs), numbers)
            lines.append(
                f"{name} = {node.op} {target_name(node.target)}{_body(node, kernel)} {args}"
            )
    return lines


def target_name(target: Any) -> str:
    """The name of a node's function, which is the same in every process."""
    if isinstance(target, str):
        return target
    if operator_names(target):
        return str(target)
    module = getattr(target, "__module__", None) or type(target).__module__
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    return f"{module}.{name or repr(target)}"


def _body(node: fx.Node, kernel: object) -> str:
    """The content of a function or kernel, as two of one name may differ."""
    function = kernel if kernel is not None else node.target
    needs_body = isinstance(function, FunctionType) and not is_library(function)
    return f" {Values().of(function)}" if needs_body or kernel is not None else ""


def _attribute(graph: fx.GraphModule, target: str) -> str:
    value = attribute_of(graph, target)
    if isinstance(value, fx.GraphModule):
        return f"graph {fingerprint(value)}"
    return f"attribute {id(value)}"


def _described(value: Any, storages: dict[int, int]) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value}"
    if parts := inner_tensors(value):
        inside = (
            _described(each, storages) if isinstance(each, torch.Tensor) else Values().of(each)
            for each in parts
        )
        return f"{tensor_text(value)} of ({', '.join(inside)})"
    memory = ""
    if value.layout is torch.strided:
        number = storages.setdefault(storage_identity(value), len(storages))
        memory = f" in {number} at {value.storage_offset()}"
    return tensor_text(value) + memory


def _argument(value: Any, numbers: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return numbers[value]
    if isinstance(value, list | tuple):
        inside = ", ".join(_argument(v, numbers) for v in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_argument(v, numbers)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice{_argument((value.start, value.stop, value.step), numbers)}"
    if isinstance(value, _NAMED):
        return str(value)
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value!r}"
    if callable(value) or isinstance(value, type):
        return target_name(value)
    # Of an unknown kind: only pieces with this very object share code.
    return f"{type(value).__name__} {id(value)}"
