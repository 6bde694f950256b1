"""Marks the outputs of a runner, so that `backward` raises where it reaches one: graphs, and the
eager steps of a runner, have no gradients. All outputs count as computed from all inputs.
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
    """The outputs of a step, such that `backward` raises where it reaches one, if gradients are on.
    The inputs in `required` require a gradient."""
    is_on = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    if not is_on or not bool(delayed_error):
        return outputs
    marks: dict[int, torch.Tensor] = {}

    def mark(tensor: torch.Tensor) -> torch.Tensor:
        differentiable = tensor.is_floating_point() or tensor.is_complex()
        if type(tensor) is not torch.Tensor or not differentiable:
            return tensor
        if id(tensor) not in marks:
            ending = delayed_error(_ENDS, 1 + len(required))
            marks[id(tensor)] = ending(tensor.detach(), *required)[0]
        return marks[id(tensor)]

    return tree.map_leaves(mark, outputs)
