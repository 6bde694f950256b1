"""Outputs that say so where `backward` reaches them: graphs, and the eager steps of a runner, have
no gradients. Which outputs depend on an input is not looked for: all of them do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base.torch_names import delayed_error

_ENDS = (
    "graphrt: gradients end at a runner, whose graphs and eager steps have none\n"
    "  expected: a loss that depends on no output of a runner\n"
    "  try: call the model itself to train it, or detach() the output, or run the step under "
    "torch.no_grad()"
)


def marked(outputs: Any, required: Sequence[torch.Tensor]) -> Any:
    """The outputs of a step of which the inputs `required` require a gradient: with gradients on
    `backward` raises where it reaches an output."""
    is_on = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    if not is_on or not bool(delayed_error):
        return outputs
    made: dict[int, torch.Tensor] = {}

    def mark(tensor: torch.Tensor) -> torch.Tensor:
        differentiable = tensor.is_floating_point() or tensor.is_complex()
        if type(tensor) is not torch.Tensor or not differentiable:
            return tensor
        if id(tensor) not in made:
            ending = delayed_error(_ENDS, 1 + len(required))
            made[id(tensor)] = ending(tensor.detach(), *required)[0]
        return made[id(tensor)]

    return tree.map_leaves(mark, outputs)
