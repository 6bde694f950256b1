"""Tensors that are one, or views of one storage: what is copied elsewhere keeps that.

Eager gives `y, y[:, :4]` as two tensors over one memory, and what its caller writes into one is in
the other. A copy of each would be two memories.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from graphrt.core.base import tree

_WASTE = 2
"""Views that share no element get one memory if it is at most so many times what they need: those
of two rows of a cache would take all that lies in between."""

_ALIGNED = 16
"""Bytes: a memory begins where every dtype can."""


class Together(NamedTuple):
    """Tensors over one memory, by their places among those asked about: one, mostly. It begins
    `start` bytes into their storage and has `nbytes`."""

    places: tuple[int, ...]
    start: int = 0
    nbytes: int = 0

    def over(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> torch.Tensor:
        """What `tensor`, one of them, is over a storage that begins where their memory does."""
        empty = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        offset = tensor.storage_offset() - self.start // tensor.element_size()
        return empty.set_(storage, offset, tensor.shape, tensor.stride())


def address(tensor: torch.Tensor) -> int:
    """Of the storage: one as long as both of two tensors live."""
    return tensor.untyped_storage().data_ptr()


def together(
    tensors: Sequence[torch.Tensor], memory: Callable[[torch.Tensor], Hashable] = address
) -> list[Together]:
    """Which of these, all of them objects of their own, lie in one `memory`."""
    found: dict[Hashable, list[int]] = {}
    for place, tensor in enumerate(tensors):
        alone = tensor.layout is not torch.strided or tensor.numel() == 0 or is_lazy(tensor)
        found.setdefault((None, place) if alone else memory(tensor), []).append(place)
    groups: list[Together] = []
    for places in found.values():
        groups += [Together((places[0],))] if len(places) == 1 else _joined(tensors, places)
    return groups


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether torch has put off a conjugation or negation, which is no part of the memory."""
    return tensor.is_conj() or tensor.is_neg()


def cloned(outputs: Any) -> Any:
    """A tree of the same structure over memory of its own, shared as it is there."""
    if isinstance(outputs, torch.Tensor):
        return outputs.clone()
    copies = clones(tree.tensors(outputs))
    return tree.map_tensors(lambda tensor: copies[id(tensor)], outputs)


def clones(tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Copies by the `id` of each, over memory that they share as these do."""
    own = list({id(tensor): tensor for tensor in tensors}.values())
    copies: dict[int, torch.Tensor] = {}
    for group in together(own) if len(own) > 1 else [Together((0,))] * len(own):
        members = [own[place] for place in group.places]
        if len(members) == 1:
            copies[id(members[0])] = members[0].clone()
            continue
        device = members[0].device
        storage = torch.empty(group.nbytes, dtype=torch.uint8, device=device).untyped_storage()
        for tensor in members:
            copy = copies[id(tensor)] = group.over(storage, tensor)
            write(copy, tensor)
    return copies


def write(copy: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write the values of `tensor` into one of its strides; an expanded one has fewer values."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            copy, tensor = copy.narrow(dim, 0, 1), tensor.narrow(dim, 0, 1)
    copy.copy_(tensor)


def _joined(tensors: Sequence[torch.Tensor], places: Sequence[int]) -> list[Together]:
    """Those of one memory, apart where to keep them together would waste it."""
    whole = _spanning(tensors, places)
    if whole.nbytes <= _WASTE * sum(tensors[place].nbytes for place in places):
        return [whole]
    parts: list[list[int]] = []
    for place in places:
        touched = [
            part
            for part in parts
            if not all(_are_apart(tensors[place], tensors[other]) for other in part)
        ]
        parts = [part for part in parts if part not in touched]
        parts.append([place, *(other for part in touched for other in part)])
    return [
        Together((part[0],)) if len(part) == 1 else _spanning(tensors, sorted(part))
        for part in parts
    ]


def _spanning(tensors: Sequence[torch.Tensor], places: Sequence[int]) -> Together:
    extents = [_extent(tensors[place]) for place in places]
    start = min(begin for begin, _ in extents) // _ALIGNED * _ALIGNED
    return Together(tuple(places), start, max(end for _, end in extents) - start)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage from its first element to the end of its last."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset())
    return begin * tensor.element_size(), (begin + last + 1) * tensor.element_size()


def _are_apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one storage are known to have no element in common."""
    if a.storage_offset() > b.storage_offset():
        a, b = b, a
    if _extent(a)[1] <= _extent(b)[0]:
        return True
    if a.stride() != b.stride() or a.dtype != b.dtype:
        return False
    left, above = int(b.storage_offset() - a.storage_offset()), 0
    for step, size, other in sorted(zip(a.stride(), a.shape, b.shape, strict=True), reverse=True):
        if step == 0 or (above and max(size, other) * step > above):
            return False
        shift, left = divmod(left, step)
        if shift >= size:
            return True
        above = step
    return False
