"""Outputs that eager would give a gradient, and that say so where `backward` reaches them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base._undo import Undo
from graphrt.core.base.thread_mode import where_asked
from graphrt.core.base.torch_names import delayed_error, uncompiled
from graphrt.core.inputs.buffers import StaticInputs
from graphrt.core.inputs.declared import flat_of
from graphrt.core.trust.watching.gradients import WEIGHTS, GradientWatch

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
        self.of_inputs = self._on and inputs.may_require_gradients
        self.reset()

    def reset(self) -> None:
        """Forget what was found."""
        self._sources: dict[str, frozenset[str]] | None = None
        self._weights: list[weakref.ref[torch.Tensor]] = []
        self._asked = self._of_weights

    def look(self, values: Mapping[str, Any]) -> bool:
        """Before a step that is given `values`: whether it is to find out what nobody knows yet."""
        if not self._asked and self.of_inputs:
            self._asked = self._inputs.require_gradients(values) and expected()
        return self.wanted

    @property
    def wanted(self) -> bool:
        """Whether the next run is to find out."""
        return self._on and self._asked and self._sources is None and expected()

    def find(self, call: Callable[[], Any], arguments: Mapping[str, Any]) -> Any:
        """Call the forward, and note which of its outputs are such ones."""
        watch = GradientWatch(_by_name(arguments))
        undo = Undo()
        try:
            # Code would be compiled anew, for gradients that nobody asks for.
            undo.enter(uncompiled())
            outputs = where_asked(lambda: watch.around(call), True, False)
            undo.now()
        except BaseException:
            # Not at every step again.
            self._sources = {}
            undo.now()
            raise
        self._sources = watch.sources(outputs)
        self._weights = [weakref.ref(each) for each in watch.weights.values()]
        return outputs

    def marked(self, outputs: Any, values: Mapping[str, Any]) -> Any:
        """The outputs of a step that was given `values`, with such ones marked."""
        if not self._sources or not expected():
            return outputs
        found = {name: each for name, each in _by_name(values).items() if each.requires_grad}
        weights = (weight() for weight in self._weights if self._of_weights)
        # One stands for all: `backward` raises before it gets to any.
        weight = next((each for each in weights if each is not None and each.requires_grad), None)
        if weight is not None:
            found[WEIGHTS] = weight
        if not found:
            return outputs
        marked: dict[int, torch.Tensor] = {}
        for path, leaf in tree.leaves(outputs):
            needs = [found[each] for each in self._sources.get(path, ()) if each in found]
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
