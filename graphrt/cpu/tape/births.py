"""Memory that a forward makes of Python data: each replay begins with what the capture saw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ReferenceType

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphrt.cpu.arena import Arena
from graphrt.cpu.private_torch import storage_ids
from graphrt.cpu.tape.lowering import Call
from graphrt.cpu.tape.operators import Operator
from graphrt.cpu.tape.refusals import WRITTEN_WRAP
from graphrt.cpu.tape.tensors import tensors_in


class _Birth:
    def __init__(self, held: Any, seen: ReferenceType[Any], call: Call) -> None:
        self.held = held
        """Keeps the block in use, so that nothing else is ever written into it."""
        self.seen = seen
        """Whether the forward still has it."""
        self.restore = call
        self.written = False


class Births:
    """The constants of one tape.

    No operator makes them. One that is neither written nor kept by the forward costs a replay
    nothing: its block is the graph's own. What operators compute of nothing else is a constant too:
    its values are the same at every replay, so the forward may read them.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._born: dict[int, _Birth] = {}
        # By what names their memory; while there is a weak reference nothing else has the name.
        self._constant: dict[int, StorageWeakRef] = {}

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the forward gets for a tensor that was just made of Python data."""
        plain = tensor.layout is torch.strided and tensor.is_cpu and not tensor.is_quantized
        if not plain or not tensor.numel() or self._arena.owns(tensor):
            return tensor
        if not tensor.untyped_storage().resizable():
            self.wrapped(tensor)
            return tensor
        value = tensor.detach().clone()
        out, held, seen = self._arena.constant(value)
        out.copy_(value)
        restore = Call(torch.Tensor.copy_, (self._arena.alias(out), value))
        self._born[out.untyped_storage().data_ptr()] = _Birth(held, seen, restore)
        self._note_constant(out)
        return out

    def are_constant(self, arguments: Any) -> bool:
        """Whether there are tensors in `given`, and all are constants."""
        tensors = tensors_in(arguments)
        return bool(tensors) and all(map(self._is_constant, tensors))

    def derive(self, op: Operator, arguments: Any, result: Any) -> None:
        """Note what an operator has computed: constants, if all that it was given is."""
        if (
            op.repeatable
            and not op.allocates
            and all(map(self._is_constant, tensors_in(arguments)))
        ):
            for tensor in tensors_in(result):
                self._note_constant(tensor)

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided or type(tensor) is not torch.Tensor:
            return False
        return tensor.untyped_storage()._cdata in self._constant

    def _note_constant(self, tensor: torch.Tensor) -> None:
        if tensor.layout is torch.strided and type(tensor) is torch.Tensor:
            storage = tensor.untyped_storage()
            self._constant[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def wrapped(self, value: Any) -> None:
        """Note tensors over memory that the host may hold too: an array, a buffer, a file."""
        known = self._arena.wrapped
        for storage in [storage for storage, ref in known.items() if ref.expired()]:
            del known[storage]
        tensors = [t for t in tensors_in(value) if t.layout is torch.strided]
        for tensor, storage in zip(tensors, storage_ids(tensors), strict=True):
            known[storage] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def write(self, op: Operator | None, arguments: Any, written: Any = None) -> None:
        """Note that an operator of what is `given` may write the tensors in `written`; a compiled
        callable may write all."""
        if not (self._born or self._constant or self._arena.wrapped):
            return
        tensors = tensors_in(arguments if written is None else written)
        if op is None or not op.built_in or op.random or not self.are_constant(arguments):
            self._forget_constants(tensors)
        of_host = self._arena.wrapped.keys()
        if op is not None and op.mutates and not of_host.isdisjoint(storage_ids(tensors)):
            raise WRITTEN_WRAP(op=op.label)
        self._note_written(tensors)

    def _forget_constants(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.layout is torch.strided:
                self._constant.pop(tensor.untyped_storage()._cdata, None)

    def _note_written(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.layout is torch.strided:
                birth = self._born.get(tensor.untyped_storage().data_ptr())
                if birth is not None:
                    birth.written = True

    def finish(self) -> tuple[list[Call], list[Any]]:
        """What a replay begins with, and what the graph keeps in use."""
        births = list(self._born.values())
        self._born.clear()
        self._constant.clear()
        restores = [b.restore for b in births if b.written or b.seen() is not None]
        return restores, [b.held for b in births]
