"""Elementwise operators of a tape as loops in C++, which leave the same bits in the same memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.cpu.tape.aliases import PLAIN, unexpanded
from graphrt.cpu.tape.operators import Operator
from graphrt.cpu.tape.recorder import Step

_TYPES = {torch.float32: "float", torch.float64: "double", torch.bool: "unsigned char"}
# What IEEE 754 rounds in one way, and torch too. Its square roots are a library's, with other bits;
# and of 0.0 and -0.0 its maximum takes either.
_EXPRESSIONS = {
    "add": "{} + {}",
    "div": "{} / {}",
    "mul": "{} * {}",
    "neg": "-{}",
    "reciprocal": "1 / {}",
    "rsqrt": "1 / root({})",
    "rsub": "{1} - {0}",
    "sub": "{} - {}",
    "where": "{} ? {} : {}",
}
_NAMES = {"_to_copy", "cat", "clone", "copy", "pow", *_EXPRESSIONS}
_MOST_VALUES = 32768
"""Torch spreads larger operators over threads."""


class Loop:
    """`out = expression` of the operands, for each element."""

    def __init__(self, expression: str, out: torch.Tensor, operands: Sequence[Any]) -> None:
        self._expression = expression
        self._operands = operands
        expanded = (o.expand(out.size()) for o in operands if isinstance(o, torch.Tensor))
        self.tensors = [out, *expanded]
        # The fewest dimensions, each as its size and all strides; the smallest of `out` is last.
        self._dims: list[tuple[int, ...]] = []
        dims = [(n, *(t.stride(d) for t in self.tensors)) for d, n in enumerate(out.size())]
        for n, *strides in sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: -dim[1]):
            if self._dims and list(self._dims[-1][1:]) == [n * stride for stride in strides]:
                n *= self._dims.pop()[0]
            self._dims.append((n, *strides))

    def parameters(self, address_of: Callable[[torch.Tensor], int]) -> list[int]:
        """The addresses of `tensors`, then sizes and strides."""
        return [*map(address_of, self.tensors), *(n for dim in self._dims for n in dim)]

    def source(self, first: int) -> str:
        """C++, for parameters from p[first] on: the same for all sizes."""
        lines, places = list[str](), list[str]()
        for at, tensor in enumerate(self.tensors, first):
            pointer = f"{_TYPES[tensor.dtype]} *"
            lines.append(f"{pointer}x{at} = ({pointer})p[{at}];")
            places.append(f"x{at}[0")
        loops, at = list[str](), first + len(places)
        for _, *strides in self._dims:
            lines.append(f"const long long n{at} = p[{at}];")
            # Compilers need not look whether a turn reads what another writes: `is_right`.
            hint = "\n#pragma GCC ivdep\n" if len(loops) == len(self._dims) - 1 else ""
            loops.append(f"{hint}for (long long i{at} = 0; i{at} < n{at}; ++i{at})")
            for column, stride in enumerate(strides):
                step = f"p[{at + 1 + column}]" if stride > 1 else stride
                lines.append(f"const long long s{at}_{column} = {step};")
                places[column] += f" + i{at} * s{at}_{column}"
            at += 1 + len(strides)
        out, *reads = (f"{place}]" for place in places)
        number = _TYPES[self.tensors[0].dtype]
        values = [
            reads.pop(0) if isinstance(o, torch.Tensor) else f"({number}){float(o).hex()}"
            for o in self._operands
        ]
        return " ".join(["{", *lines, *loops, f"{out} = {self._expression.format(*values)};", "}"])

    def is_right(self) -> bool:
        """Whether C++ computes torch's bits as far as dtypes and numbers tell, and no element of
        `out` shares memory with another one, nor with another element of an operand."""
        out = self.tensors[0]
        numbers = [o for o in self._operands if not isinstance(o, torch.Tensor)]
        if not 0 < out.numel() <= _MOST_VALUES or len(self.tensors) == 1:
            return False
        if not all(type(n) in (int, float) and abs(n) <= 2**53 for n in numbers):
            return False
        for t in self.tensors:
            if t.dtype not in _TYPES or t.is_neg() or t.data_ptr() % t.element_size():
                return False
        dtypes = [t.dtype for t in self.tensors]
        if "?" in self._expression and (dtypes.pop(1) != torch.bool or numbers):
            return False
        if len(set(dtypes)) > 1 or (torch.bool in dtypes and self._expression != "{}"):
            return False
        reach = 0
        for size, stride, *_ in reversed(self._dims):
            if stride <= reach:
                return False
            reach += (size - 1) * stride
        start, end = span(out)
        for at, (first, last) in enumerate(map(span, self.tensors[1:]), 2):
            same = first == start and all(dim[1] == dim[at] for dim in self._dims)
            if first < end and start < last and not same:
                return False
        return True


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte, and the one behind its last."""
    start = tensor.data_ptr()
    reach = sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    return start, start + (reach + 1) * tensor.element_size()


def _name(op: Operator) -> str:
    name = op.name.removeprefix("aten::")
    return name.removesuffix("_") if op.mutates else name


def values_before(
    op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """Copies of what a call of `op` is about to read, if it may become loops."""
    tensors = tree.tensors(args, kwargs) if _name(op) in _NAMES else []
    if any(type(t) not in PLAIN or not t.is_cpu or t.numel() > _MOST_VALUES for t in tensors):
        return []
    return [unexpanded(t.detach()).clone() for t in tensors if t.layout is torch.strided]


def output_of(step: Step) -> Any:
    """The tensor that a step writes; None if its result is copied."""
    call = step.lowered.call
    outputs = {"in_place": step.args, "copy_": call.args, "constant": call.args}
    return (*outputs.get(step.lowered.kind, ())[:1], call.kwargs.get("out"))[0]


def loops_of(step: Step) -> list[Loop]:
    """Loops that compute what the step does; none where that is not known."""
    name, out, operands = _name(step.op), output_of(step), tuple(step.args)
    if len(step.tensors) != len(step.values):
        return []
    if any(type(t) is not torch.Tensor or not t.is_cpu for t in (out, *step.tensors)):
        return []
    loops = []
    if step.lowered.kind in ("copy_", "constant"):
        loops = [Loop("{}", out, step.lowered.call.args[1:])]
    elif name == "copy":
        loops = [Loop("{}", out, operands[1:2])]
    elif step.kwargs or name not in _NAMES:
        return []
    elif name == "cat":
        parts, dim = operands[0], operands[1] if len(operands) > 1 else 0
        if all(part.dim() == out.dim() for part in parts):
            outs = out.split_with_sizes([part.size(dim) for part in parts], dim)
            loops = [Loop("{}", o, (part,)) for o, part in zip(outs, parts, strict=True)]
    elif name == "pow":
        loops = [Loop("{0} * {0}", out, operands[:1])] if str(operands[1]) in ("2", "2.0") else []
    elif _EXPRESSIONS.get(name, "").count("{") == len(operands):
        loops = [Loop(_EXPRESSIONS[name], out, operands)]
    return loops if all(map(Loop.is_right, loops)) else []
