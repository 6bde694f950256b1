"""How a tape refers to tensors: weakly to arena memory, and strongly to everything else."""

from __future__ import annotations

from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base.torch_names import inference_guard
from graphrt.cpu.arena import Arena
from graphrt.cpu.private_torch import storage_ids
from graphrt.cpu.tape.refusals import NESTED_ARGUMENT

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types whose operators are recorded as they are."""

_CONTAINERS = frozenset({list, tuple, dict})

Kept = dict[int, torch.Tensor]
"""By the `id` of what one call is given, what the tape keeps of it."""


class Aliases:
    """The references of one tape, and which blocks of the arena some recorded operator reads."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._aliases: dict[tuple[object, ...], torch.Tensor] = {}
        self._read: set[int] = set()

    def was_read(self, token: int) -> bool:
        """Whether an operator reads that block."""
        return token in self._read

    def clear(self) -> None:
        """Forget the aliases; steps keep those that they use."""
        self._aliases.clear()

    def weak(self, *values: Any) -> list[Any]:
        """The lists, tuples or dicts that one call is given, with their tensors as the tape keeps
        them. One tensor stays one, and two at one place stay two: kernels look. Attention projects
        at once a query that is its key and its value, which rounds otherwise."""
        kept: Kept = {}
        return [self._weak_in(value, kept) for value in values]

    def _weak_in(self, value: Any, kept: Kept) -> Any:
        named = type(value) is dict
        weak = []
        for item in value.values() if named else value:
            if isinstance(item, torch.Tensor):
                if id(item) not in kept:
                    kept[id(item)] = self._weak_tensor(item, kept)
                weak.append(kept[id(item)])
            elif type(item) in _CONTAINERS:
                weak.append(self._weak_in(item, kept))
            else:
                weak.append(item)
        return dict(zip(value, weak, strict=True)) if named else type(value)(weak)

    def weak_output(self, out: torch.Tensor) -> torch.Tensor:
        """The tape's reference to an output; does not count as a read."""
        return self._alias(out) if out.numel() else _stand_in(out)

    def _weak_tensor(self, tensor: torch.Tensor, kept: Kept) -> torch.Tensor:
        if type(tensor) not in PLAIN:
            return tensor
        if tensor.is_nested:
            raise NESTED_ARGUMENT()
        if tensor.layout is torch.strided and tensor.device.type == "cpu":
            if not tensor.numel():
                # It has no address; where its storage is a block, it must not keep that in use.
                if self.arena.token_of(tensor):
                    return _stand_in(tensor)
            elif self.arena.owns(tensor):
                self._read.add(self.arena.token_of(tensor))
                alias = self._alias(tensor)
                if any(alias is other for other in kept.values()):
                    return self._new_alias(tensor)
                return alias
        # A detached alias is a plain tensor whatever the caller's grad mode is at replay, and like
        # a device graph it stays at the address that was captured.
        with inference_guard(False), torch.no_grad():
            return tensor.detach()

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        key = _place(tensor)
        alias = self._aliases.get(key)
        if alias is None:
            alias = self._aliases[key] = self._new_alias(tensor)
        return alias

    def _new_alias(self, tensor: torch.Tensor) -> torch.Tensor:
        with inference_guard(False), torch.no_grad():
            return self.arena.alias(tensor)


def _stand_in(empty: torch.Tensor) -> torch.Tensor:
    """Another tensor without elements, of this shape for good: the forward may transpose its own in
    place (`x[:, :0].clone().t_()`), and a replay would write the old shape into the new one."""
    with inference_guard(False), torch.no_grad():
        return torch.empty_strided(
            empty.size(), empty.stride(), dtype=empty.dtype, device=empty.device
        )


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        tensor.data_ptr(),
        tensor.storage_offset(),
        tensor.size(),
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def with_replaced(value: Any, others: dict[int, torch.Tensor]) -> Any:
    """`value` with others in place of the tensors that these have by `id`."""
    return tree.map_leaves(lambda tensor: others.get(id(tensor), tensor), value)


def fresh_among(tensors: list[torch.Tensor], arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """Those of `tensors` that share no memory with the tensors in `arguments`."""
    held = set(storage_ids(tree.tensors(*arguments)))
    storages = storage_ids(tensors)
    return [t for t, storage in zip(tensors, storages, strict=True) if storage not in held]


def core(tensor: torch.Tensor) -> torch.Tensor:
    """Without the dimensions that repeat one element, which cannot be written through."""
    if 0 not in tensor.stride():
        return tensor
    sizes = [1 if step == 0 else n for n, step in zip(tensor.size(), tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride())
