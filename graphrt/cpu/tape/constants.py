"""Tensors that a capture makes: constants from Python data, and tensor objects whose shape the
forward may change in place."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any
from weakref import ReferenceType

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphrt.core.base import tree
from graphrt.core.replay.recording import current_capture
from graphrt.cpu.arena import Arena
from graphrt.cpu.private_torch import storage_ids
from graphrt.cpu.tape.lowering import REFUSALS, Call
from graphrt.cpu.tape.operators import Operator
from graphrt.cpu.tape.refusals import WRITTEN_WRAP


class _Constant:
    """One constant of a tape: `restore` is the call that sets its values again; `written` says
    whether an operator of the forward writes it."""

    def __init__(self, held: Any, in_use: ReferenceType[Any], restore: Call) -> None:
        self.held = held
        """Keeps the block in use, so that nothing else is ever written into it."""
        self.in_use = in_use
        """Dead once the forward has let go of the constant."""
        self.restore = restore
        self.written = False


class TapeConstants:
    """Keeps the constants of one tape, tensors of Python data (`torch.tensor([1, 2])`), which no
    operator makes and so no replay would.

    Each is in a block that only this graph uses. A replay sets its values again only if the forward
    writes or keeps it. A result that depends on constants alone is a constant too: its values are
    the same at every replay, so the forward may read it on the host.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        # Address of a block -> its constant.
        self._made: dict[int, _Constant] = {}
        # The storages of constants and of results derived from them: number -> weak reference,
        # which keeps the number from being reused.
        self._constant: dict[int, StorageWeakRef] = {}

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that the forward gets for one that was just made of Python data."""
        is_dense = tensor.layout is torch.strided and tensor.is_cpu and not tensor.is_quantized
        if not is_dense or not tensor.numel() or self._arena.owns(tensor):
            return tensor
        if not tensor.untyped_storage().resizable():
            # It is over memory of the host: `torch.from_numpy(array)`.
            self.note_wrapped(tensor)
            return tensor
        value = tensor.detach().clone()
        out, held, in_use = self._arena.constant(value)
        out.copy_(value)
        restore = Call(torch.Tensor.copy_, (self._arena.alias(out), value))
        self._made[out.untyped_storage().data_ptr()] = _Constant(held, in_use, restore)
        self._note_constant(out)
        return out

    def are_constant(self, arguments: Any) -> bool:
        """Whether there are tensors in `arguments`, and all are constants."""
        tensors = tree.tensors(arguments)
        return bool(tensors) and all(map(self._is_constant, tensors))

    def derive(self, op: Operator, arguments: tuple[Any, ...], result: Any) -> None:
        """Note the result of an operator as constant if all its tensor arguments are."""
        if (
            op.repeatable
            and not op.allocates
            and all(map(self._is_constant, tree.tensors(*arguments)))
        ):
            for tensor in tree.tensors(result):
                self._note_constant(tensor)

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided or type(tensor) is not torch.Tensor:
            return False
        return tensor.untyped_storage()._cdata in self._constant

    def _note_constant(self, tensor: torch.Tensor) -> None:
        if tensor.layout is torch.strided and type(tensor) is torch.Tensor:
            storage = tensor.untyped_storage()
            self._constant[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def note_wrapped(self, value: Any) -> None:
        """Note tensors over memory that the host may hold too: an array, a buffer, a file."""
        wrapped = self._arena.wrapped
        for storage in [storage for storage, ref in wrapped.items() if ref.expired()]:
            del wrapped[storage]
        tensors = [t for t in tree.tensors(value) if t.layout is torch.strided]
        for tensor, storage in zip(tensors, storage_ids(tensors), strict=True):
            wrapped[storage] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def note_write(self, op: Operator, arguments: Any, written: Any) -> None:
        """Note that an operator of these `arguments` may write the tensors in `written`."""
        if not (self._made or self._constant or self._arena.wrapped):
            return  # as in most captures
        tensors = tree.tensors(written)
        if not op.built_in or op.random or not self.are_constant(arguments):
            # It may write other values at each replay; from constants alone it writes the same.
            self._forget_constants(tensors)
        of_host = self._arena.wrapped.keys()
        if op.mutates and not of_host.isdisjoint(storage_ids(tensors)):
            raise WRITTEN_WRAP(op=op.label)
        self._note_written(tensors)

    def _forget_constants(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.layout is torch.strided:
                self._constant.pop(tensor.untyped_storage()._cdata, None)

    def _note_written(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.layout is torch.strided:
                constant = self._made.get(tensor.untyped_storage().data_ptr())
                if constant is not None:
                    constant.written = True

    def finish(self) -> tuple[list[Call], list[Any]]:
        """The calls that a replay begins with, and the blocks that the graph keeps in use."""
        made = list(self._made.values())
        self._made.clear()
        self._constant.clear()
        restores = [c.restore for c in made if c.written or c.in_use() is not None]
        return restores, [c.held for c in made]


# Tensor objects, and changes of their shape, strides or memory, which are in no graph -------------


class OwnTensors:
    """Knows the tensor objects that a capture made or that only it was given. The forward may
    change their shape in place (`t_()`), as each of its runs has new ones."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        # id of a tensor -> weak reference: a later tensor may get the id.
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}

    def note(self, result: Any) -> Any:
        """Return `result` and note its tensors, except those in graph memory: `has` knows them."""
        for tensor in (result,) if isinstance(result, torch.Tensor) else tree.tensors(result):
            if not self._arena.owns(tensor):
                self._made[id(tensor)] = weakref.ref(tensor)
        return result

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether this capture made `tensor`."""
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
    before = _geometry(meta)
    try:
        op.func(meta, *args[1:], **kwargs)
    except REFUSALS:
        return True
    return before != _geometry(meta)


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.size(), tensor.stride(), tensor.storage_offset()
