"""`InputSlot`: host memory in which the inputs of steps are written in place."""

from __future__ import annotations

from typing import final

import torch

from graphrt.core.base.homes import public
from graphrt.core.batch.descriptor import Batch


@final
@public("graphrt")
class InputSlot(dict[str, torch.Tensor]):
    """Host memory for the inputs of `batch`: `slot[name]` is the live rows of an input, by its
    (dotted) name, as a CPU tensor, which holds padding until it is written.

    `runner(slot)` runs the step of what is written there. The host may keep the slot, and write and
    run it again; padding is graphrt's.
    """

    def __init__(self, batch: Batch, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.batch = batch
