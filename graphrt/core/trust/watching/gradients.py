"""Which results of a run depend on what requires gradients, as autograd would have it.

Seen operator by operator, below autograd: a graph of gradients would stay in what the run writes.
An autograd function of the host's runs without gradients there: its results count as having none.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base.thread_mode import ThreadMode, is_taken_apart
from graphrt.core.trust.watching.operators import facts_of, written

WEIGHTS = ""
"""The source of what depends on a weight, where an input is one by its name."""

Sources = frozenset[str]

# Their results have no gradient, whatever they are given.
_ENDING = {
    *(
        f"aten::{name}_like"
        for name in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")
    ),
    *(f"aten::new_{name}" for name in ("empty", "empty_strided", "full", "ones", "zeros")),
    "aten::detach",
}


class _Family:
    """A tensor and its views, of which a write to one is a write to all."""

    __slots__ = ("sources",)

    def __init__(self, sources: Sources) -> None:
        self.sources = sources


class GradientWatch(ThreadMode):
    """Follows gradients from weights that require one, and from inputs, through one run; `inputs`
    are its tensors by name. The run has the grad mode on."""

    supports_higher_order_operators = True

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weights: dict[int, torch.Tensor] = {}
        """Those that the run has used, and that required a gradient then."""
        self._ends = {
            name: (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
            for name, tensor in inputs.items()
            if tensor.is_floating_point() or tensor.is_complex()
        }
        # An identifier is given again once its tensor is gone.
        self._families: dict[int, tuple[weakref.ref[torch.Tensor], _Family]] = {}

    def sources(self, outputs: Any) -> dict[str, Sources]:
        """By path, what each output of the run depends on: `WEIGHTS`, or inputs by name."""
        return {
            path: self._family(leaf).sources
            for path, leaf in tree.leaves(outputs)
            if isinstance(leaf, torch.Tensor) and _differentiable(leaf)
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_taken_apart(func):
            return self.take_apart(func, args, kwargs)
        result = func(*args, **kwargs)
        facts = facts_of(func)
        given = [self._family(each) for each in tree.tensors([args, kwargs])]
        if not torch.is_grad_enabled() or facts.name in _ENDING:
            given = []
        sources = Sources().union(*(each.sources for each in given))
        own = list(written(facts, args, kwargs))
        for tensor in filter(_differentiable, own):
            self._family(tensor).sources |= sources
        for tensor in tree.tensors(result):
            if not any(tensor is each for each in own):
                is_view = facts.is_view and bool(given)
                made = _Family(sources if _differentiable(tensor) else Sources())
                self._families[id(tensor)] = weakref.ref(tensor), given[0] if is_view else made
        return result

    def _family(self, tensor: torch.Tensor) -> _Family:
        known = self._families.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        sources = set()
        if tensor.requires_grad:
            sources.add(WEIGHTS)
            self.weights[id(tensor)] = tensor
        elif tensor.layout is torch.strided and _differentiable(tensor):
            at = tensor.data_ptr()
            sources |= {name for name, (first, end) in self._ends.items() if first <= at < end}
        family = _Family(Sources(sources))
        self._families[id(tensor)] = weakref.ref(tensor), family
        return family


def _differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
