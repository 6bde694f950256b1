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
"""`id` of a tensor that one call is given -> the tensor that the tape keeps in its place."""


class Aliases:
    """Makes the tensors that a tape keeps in place of the forward's, as they keep no block in use;
    knows which blocks of the arena some recorded operator reads."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        # Address, shape and dtype (`_alias_key`) -> the tape's tensor for all tensors like it.
        self._aliases: dict[tuple[object, ...], torch.Tensor] = {}
        # The tokens of blocks that an operator reads.
        self._read: set[int] = set()

    def was_read(self, token: int) -> bool:
        """Whether an operator reads that block."""
        return token in self._read

    def clear(self) -> None:
        """Forget the aliases; each step keeps its own."""
        self._aliases.clear()

    def weak(self, *values: Any) -> list[Any]:
        """The lists, tuples or dicts that one call is given, with the tape's tensors in them.

        One object stays one, and two objects at one address stay two, as kernels compare them:
        attention projects query, key and value in one product if they are one object, which rounds
        differently."""
        kept: Kept = {}
        return [self._weak_in(value, kept) for value in values]

    def _weak_in(self, value: Any, kept: Kept) -> Any:
        is_dict = type(value) is dict
        weak = []
        for item in value.values() if is_dict else value:
            if isinstance(item, torch.Tensor):
                if id(item) not in kept:
                    kept[id(item)] = self._weak_tensor(item, kept)
                weak.append(kept[id(item)])
            elif type(item) in _CONTAINERS:
                weak.append(self._weak_in(item, kept))
            else:
                weak.append(item)
        return dict(zip(value, weak, strict=True)) if is_dict else type(value)(weak)

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
                # It has no address, but its storage may be a block, which it would keep in use.
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
        key = _alias_key(tensor)
        alias = self._aliases.get(key)
        if alias is None:
            alias = self._aliases[key] = self._new_alias(tensor)
        return alias

    def _new_alias(self, tensor: torch.Tensor) -> torch.Tensor:
        # A tensor made in inference mode could not be written outside of it.
        with inference_guard(False), torch.no_grad():
            return self.arena.alias(tensor)


def _stand_in(empty: torch.Tensor) -> torch.Tensor:
    """The tape's own tensor of this shape, without elements. The forward may transpose its own in
    place (`x[:, :0].clone().t_()`), and a replay would write a result of the old shape into it."""
    with inference_guard(False), torch.no_grad():
        return torch.empty_strided(
            empty.size(), empty.stride(), dtype=empty.dtype, device=empty.device
        )


def _alias_key(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        tensor.data_ptr(),
        tensor.storage_offset(),
        tensor.size(),
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def with_replaced(value: Any, replacements: dict[int, torch.Tensor]) -> Any:
    """`value` with each tensor replaced by the one under its `id`, if there is one."""
    return tree.map_leaves(lambda tensor: replacements.get(id(tensor), tensor), value)


def fresh_among(tensors: list[torch.Tensor], arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """Those of `tensors` that share no memory with the tensors in `arguments`."""
    argument_storages = set(storage_ids(tree.tensors(*arguments)))
    both = zip(tensors, storage_ids(tensors), strict=True)
    return [tensor for tensor, storage in both if storage not in argument_storages]


def unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with size 1 in each expanded dimension (stride 0), as torch does not write those."""
    if 0 not in tensor.stride():
        return tensor
    sizes = [1 if step == 0 else n for n, step in zip(tensor.size(), tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride())
