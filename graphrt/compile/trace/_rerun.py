"""Whether the operators of a graph do at sizes of 1 what they did at the sizes of the trace.

The trace takes them to do so: a symbol stands for sizes that broadcast nothing and that nothing
squeezes. Branches of Python that ask for 1 are conditions of the trace; what operators themselves
make of it shows in the shapes of their results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from graphrt.compile.private_torch.traces import expressions, fake_tensors
from graphrt.compile.trace.sizes import value_of
from graphrt.core.base.log import logger


def does_the_same(graph: fx.GraphModule, sizes: Mapping[Any, int]) -> bool:
    """Whether each result has the shape, the dtype and the value, if it is a number, that the trace
    says it has at these `sizes` of its symbols. Runs on tensors without memory; what cannot be
    run so is not the same."""
    try:
        with fake_tensors(), torch.no_grad():
            _Rerun(graph, sizes).run()
    except Exception as error:
        # Whatever it is: it was no error at the sizes of the trace. It costs a trace more, no more.
        at = ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items())
        logger.info(f"not served by the general code: {at}: {type(error).__name__}: {error}")
        return False
    return True


class _OtherResult(Exception):
    """A result has another shape."""


class _Rerun(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, sizes: Mapping[Any, int]) -> None:
        super().__init__(graph)
        self._sizes = dict(sizes)

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "placeholder":
            return self._like(value_of(n))
        result = super().run_node(n)
        if n.op == "get_attr":
            return self._like(result) if isinstance(result, torch.Tensor) else result
        if n.op != "output":
            self._compare(result, value_of(n))
        return result

    def _like(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(
                [self._number(size) for size in value.shape],
                [self._number(stride) for stride in value.stride()],
                dtype=value.dtype,
                device=value.device,
            )
        return self._number(value)

    def _number(self, value: Any) -> Any:
        if not isinstance(value, torch.SymInt):
            return value
        found = expressions(value)[0].subs(self._sizes)
        if found.free_symbols:
            raise _OtherResult(f"{value} depends on data")
        return int(found)

    def _compare(self, got: Any, traced: Any) -> None:
        if isinstance(traced, tuple | list):
            if len(got) != len(traced):
                raise _OtherResult(f"{len(got)} results, {len(traced)} in the trace")
            for one, other in zip(got, traced, strict=True):
                self._compare(one, other)
        elif isinstance(traced, torch.Tensor):
            shape = tuple(self._number(size) for size in traced.shape)
            if tuple(got.shape) != shape or got.dtype is not traced.dtype:
                ours = f"{got.dtype} {tuple(got.shape)}"
                raise _OtherResult(f"{ours}, {traced.dtype} {shape} by the trace")
        elif isinstance(traced, torch.SymInt | int) and got != self._number(traced):
            raise _OtherResult(f"{got}, {self._number(traced)} by the trace")
