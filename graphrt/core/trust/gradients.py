"""Outputs that eager would give a gradient, and that say so where `backward` reaches them.

Which results of a run depend on what requires gradients is seen operator by operator, below
autograd: a graph of gradients would stay in what the run writes. An autograd function of the host's
runs without gradients there: its results count as having none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.thread_mode import ThreadMode, where_asked
from graphrt.core.base.torch_names import delayed_error, uncompiled
from graphrt.core.capture.operators import facts_of, written
from graphrt.core.inputs.buffers import StaticInputs
from graphrt.core.inputs.declared import flat_of

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

_ENDS = (
    "graphrt.errors.GradientError: gradients end at a runner, whose graphs and eager steps have "
    "none\n"
    "  expected: a loss that depends on no output of a runner\n"
    "  try: call the model itself to train it, or detach() the output, or run the step under "
    "torch.no_grad()"
)


class Gradients:
    """Which outputs of a forward depend on what requires gradients: found in one run of it with
    gradients on, and looked at in every step with gradients on.

    Of weights that is done only where it was asked for: most who infer with gradients on have no
    other reason for them, and an output that requires one is refused by `numpy()`. Of an input that
    requires a gradient it always is.
    """

    def __init__(self, inputs: StaticInputs, *, on: bool, of_weights: bool) -> None:
        self._on = on and bool(delayed_error)
        self._of_weights = of_weights
        self._inputs = inputs
        # Whether inputs may require one, so that somebody has to look.
        self.of_inputs = self._on and bool(inputs.graded)
        self.reset()

    def reset(self) -> None:
        """Forget what was found."""
        self._sources: dict[str, frozenset[str]] | None = None
        self._weights: list[weakref.ref[torch.Tensor]] = []
        self._asked = self._of_weights

    def look(self, values: Mapping[str, Any]) -> bool:
        """Before a step that is given `values`: whether it has to find which outputs depend on what
        requires gradients."""
        if not self._asked and self.of_inputs:
            self._asked = self._inputs.require_gradients(values) and expected()
        return self.wanted

    @property
    def wanted(self) -> bool:
        """Whether the next run has to find that."""
        return self._on and self._asked and self._sources is None and expected()

    @undoing
    def find(self, undo: Undo, call: Callable[[], Any], arguments: Mapping[str, Any]) -> Any:
        """Call the forward, and note which of its outputs depend on what requires gradients."""
        watch = GradientWatch(_by_name(arguments))
        undo.after_error(partial(setattr, self, "_sources", {}))  # not at every step again
        # Code would be compiled anew, for gradients that nobody asks for.
        undo.enter(uncompiled())
        outputs = where_asked(lambda: watch.around(call), True, False)
        self._sources = watch.sources(outputs)
        self._weights = [weakref.ref(each) for each in watch.weights.values()]
        return outputs

    def marked(self, outputs: Any, values: Mapping[str, Any]) -> Any:
        """The outputs of a step that was given `values`; those that depend on what requires
        gradients are marked, and raise where `backward` reaches them."""
        if not self._sources or not expected():
            return outputs
        required = {name: each for name, each in _by_name(values).items() if each.requires_grad}
        weights = (weight() for weight in self._weights if self._of_weights)
        # One stands for all: `backward` raises before it gets to any.
        weight = next((each for each in weights if each is not None and each.requires_grad), None)
        if weight is not None:
            required[WEIGHTS] = weight
        if not required:
            return outputs
        marked: dict[int, torch.Tensor] = {}
        for path, leaf in tree.leaves(outputs):
            needs = [required[each] for each in self._sources.get(path, ()) if each in required]
            if needs and type(leaf) is torch.Tensor and id(leaf) not in marked:
                marked[id(leaf)] = delayed_error(_ENDS, 1 + len(needs))(leaf.detach(), *needs)[0]
        return tree.map_tensors(lambda tensor: marked.get(id(tensor), tensor), outputs)


def _by_name(inputs: Any) -> dict[str, torch.Tensor]:
    """Tensors by dotted names; of a slot that the host has filled, none."""
    flat = flat_of(inputs) if isinstance(inputs, Mapping) else ()
    return {name: value for name, value in flat if isinstance(value, torch.Tensor)}


def expected() -> bool:
    """Whether eager results have gradients here."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


# Found in one run --------------------------------------------------------------------------------


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

    def handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
