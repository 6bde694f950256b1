"""A sample's tensors as static buffers, and other numbers that fit into them."""

from __future__ import annotations

from typing import Any

import torch

from graphrt.core.base import tree

Values = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of one call: positional, the operator's input first, and by name."""


class Buffers:
    """Tensors at fixed places, laid out and sharing memory as those of a sample do."""

    def __init__(self, first: Values) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._storages_of: dict[int, torch.UntypedStorage] = {}
        self._made: dict[int, torch.Tensor] = {}
        args, kwargs = tree.map_leaves(self._buffer, first)
        self.values: Values = (args, kwargs)
        self._tensors = tree.tensors(self.values)

    def write(self, new: Values) -> None:
        """The numbers of `new`, whose tensors are laid out as the first ones; what an operator did
        to the shape of a buffer is undone."""
        for buffer, tensor in zip(self._tensors, tree.tensors(new), strict=True):
            if is_plain(buffer):
                if _layout(buffer)[:4] != _layout(tensor)[:4]:
                    buffer.data = _over(self._storages_of[id(buffer)], tensor)
                buffer.untyped_storage().copy_(tensor.untyped_storage())

    def grown(self, first: Values) -> bool:
        """Whether an operator gave one of them other memory than it has for `first`."""
        return any(
            is_plain(tensor)
            and buffer.untyped_storage().nbytes() != tensor.untyped_storage().nbytes()
            for buffer, tensor in zip(self._tensors, tree.tensors(first), strict=True)
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those in `values`."""
        return self._tensors

    def places(self) -> list[int]:
        """Where the memory of each is."""
        return [t.untyped_storage().data_ptr() if is_plain(t) else -1 for t in self._tensors]

    def _buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        if not is_plain(tensor):
            return tensor
        known = self._made.get(id(tensor))
        if known is None:
            storage = tensor.untyped_storage()
            # The same tensor twice, or two views of one, stay that.
            if storage._cdata not in self._storages:
                self._storages[storage._cdata] = storage.clone()
            mine = self._storages[storage._cdata]
            known = self._made[id(tensor)] = _over(mine, tensor)
            self._storages_of[id(known)] = mine
        return known


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory can be written as it is."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def fits(first: Values, second: Values) -> bool:
    """Whether the tensors of `second` can be written into those of `first`."""
    tensors, others = tree.tensors(first), tree.tensors(second)
    return len(tensors) == len(others) and all(map(_laid_out_alike, tensors, others))


def same(first: Values, second: Values) -> bool:
    """Whether the tensors of both, which fit, hold the same bits."""
    pairs = zip(tree.tensors(first), tree.tensors(second), strict=True)
    return all(not is_plain(a) or torch.equal(_octets(a), _octets(b)) for a, b in pairs)


def rolled(values: Values, shift: int) -> Values:
    """The same with each tensor's own elements in another order."""
    memory: dict[int, torch.UntypedStorage] = {}

    def roll(tensor: torch.Tensor) -> torch.Tensor:
        if not is_plain(tensor):
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata not in memory:
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            memory[storage._cdata] = whole.roll(shift).untyped_storage()
        return _over(memory[storage._cdata], tensor)

    args, kwargs = tree.map_leaves(roll, values)
    return args, kwargs


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())


def _over(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """A tensor laid out as `like` in other memory."""
    made = torch.empty(0, dtype=like.dtype, device=like.device)
    made.set_(storage, *_place(like))
    made = made.conj() if like.is_conj() else made
    return torch._neg_view(made) if like.is_neg() else made


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.size(), tensor.stride()


def _laid_out_alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return _layout(tensor) == _layout(other)


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    if not is_plain(tensor):
        return tensor.layout, tensor.dtype, tensor.size()
    return (
        tensor.dtype,
        tensor.size(),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.is_conj(),
        tensor.is_neg(),
    )
