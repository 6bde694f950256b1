"""Changes of a tensor's shape, strides or memory, which are Python's and in no graph."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from graphrt.core.replay.recording import current_capture
from graphrt.cpu.arena import Arena
from graphrt.cpu.tape.operators import Operator
from graphrt.cpu.tape.tensors import tensors_in
from graphrt.cpu.tape.trials import REFUSALS


class OwnTensors:
    """The tensor objects that a capture itself made, or was given for itself alone: its next run
    makes others.

    Results of compiled code are none of them: they may be objects that it keeps.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}

    def note(self, result: Any) -> Any:
        """`result`, of an operator that made it; what is in graph memory needs no note."""
        for tensor in (result,) if isinstance(result, torch.Tensor) else tensors_in(result):
            if not self._arena.owns(tensor):
                self._made[id(tensor)] = weakref.ref(tensor)
        return result

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether it was made in this capture."""
        made = self._made.get(id(tensor))
        if (made is not None and made() is tensor) or self._arena.owns(tensor):
            return True
        capture = current_capture()
        return capture is not None and capture.made(tensor)

    def clear(self) -> None:
        """Forget them."""
        self._made.clear()


def changes_metadata(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `op` would leave its first argument with another shape, strides or memory."""
    tensor = args[0]
    if tensor.layout is not torch.strided or op.name == "aten::set_":
        return True
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    meta = torch.empty(count, dtype=tensor.dtype, device="meta")
    meta = meta.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    before = _place(meta)
    try:
        op.func(meta, *args[1:], **kwargs)
    except REFUSALS:
        return True
    return before != _place(meta)


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.size(), tensor.stride(), tensor.storage_offset()
