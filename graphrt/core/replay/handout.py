"""Outputs as the caller gets them: fresh tensors over memory that the next step writes again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from sys import getrefcount
from typing import Any
from weakref import WeakValueDictionary, getweakrefcount

import torch
from torch import is_inference_mode_enabled

from graphrt.core.base.sharing import clones, is_lazy, together
from graphrt.core.base.torch_names import (
    can_make_tensor_over,
    can_mark_unreadable,
    inference_guard,
    mark_unreadable,
    storage_at,
    storage_use_count,
    tensor_over,
    without_dispatch_modes,
)

HandedOut = list["Shell"]
"""What the last step handed out, with what keeps its memory till the next."""

_Bases = tuple[dict[tuple[int, ...], torch.Tensor], dict[tuple[int, ...], torch.Tensor]]
_MOST_STEPS = 1024
"""A storage has a list of the processes that it was sent to, which grows as long as it serves."""

_CACHED_VIEWS = 256
"""Per output; beyond so many shapes of live rows views are made anew."""

_OVERWRITTEN = (
    "graphrt.errors.OverwrittenOutputError: this tensor is an output of an earlier step, and its "
    "memory was given to the step after it (or to a capture, or its graph was destroyed).\n"
    "  expected: outputs that are read before the next step of their pool begins\n"
    '  try: clone() what is needed longer, or GraphOptions(outputs="clone"), or give what runs in '
    "between a GraphPool of its own"
)


def expire(handed_out: HandedOut) -> None:
    """Make what was handed out unreadable: torch raises a `RuntimeError` when it is touched."""
    for shell in handed_out:
        if shell.is_held():
            shell.give_up()
    # Only now: interrupted before, all of it is marked another time.
    handed_out.clear()


def is_spare(cdata: int) -> bool:
    """Whether a storage is that of an output, kept for the next step, which nobody else has."""
    shell = _shells.get(cdata)
    return shell is not None and shell.owns(cdata) and not shell.is_held()


Handout = Callable[[tuple[int, ...], HandedOut], torch.Tensor]
"""Makes a fresh tensor of some shape (the live rows) over the memory of one output."""


def handout_of(tensor: torch.Tensor, *, raw_storages: bool) -> Handout:
    """What hands out `tensor` at every step.

    Where torch can make it unreadable after the step, the caller gets a fresh tensor over a storage
    of its own; elsewhere, and where the device has no `raw_storages`, a copy.
    """
    if tensor.numel() == 0:
        return lambda shape, handed_out: tensor.new_empty(shape)
    if raw_storages and can_mark_unreadable and not is_lazy(tensor):
        return _shell(tensor).hand_out
    views: dict[tuple[int, ...], torch.Tensor] = {}

    def copy(shape: tuple[int, ...], handed_out: HandedOut) -> torch.Tensor:
        live = views.get(shape)
        if live is None:
            # In one call: while the interpreter shuts down, torch ends the process where a tensor
            # goes that has a view.
            rows = (*shape, *tensor.shape[len(shape) :])
            live = tensor.as_strided(rows, tensor.stride())
            if len(views) < _CACHED_VIEWS:
                views[shape] = live
        return live.clone()

    return copy


def handouts_of(
    tensors: Sequence[torch.Tensor],
    *,
    raw_storages: bool,
    memory: Callable[[torch.Tensor], Hashable],
) -> list[Handout]:
    """What hands out several tensors of a step, called in their order: those that lie in one
    `memory` lie in one at every step."""
    found: dict[int, Handout] = {}
    for group in together(tensors, memory):
        members = [tensors[place] for place in group.places]
        if len(members) == 1:
            made = [handout_of(members[0], raw_storages=raw_storages)]
        elif raw_storages and can_mark_unreadable:
            shell = _shell(members[0])
            made = [shell.hand_out, *(View(shell, each).hand_out for each in members[1:])]
        else:
            copies = _Copies(members)
            made = [partial(copies.hand_out, each) for each in range(len(members))]
        found.update(zip(group.places, made, strict=True))
    return [found[place] for place in range(len(tensors))]


def _shell(tensor: torch.Tensor) -> Shell:
    return CudaShell(tensor) if tensor.is_cuda and can_make_tensor_over else Shell(tensor)


class _Copies:
    """Hands out views of one storage as views of one copy of it, padding rows included."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._copies: dict[int, torch.Tensor] = {}

    def hand_out(self, place: int, shape: tuple[int, ...], handed_out: HandedOut) -> torch.Tensor:
        tensors = self._tensors
        if place == 0:
            self._copies = clones(tensors)
        copy = self._copies[id(tensors[place])]
        if place == len(tensors) - 1:
            # What is handed out is the caller's alone.
            self._copies = {}
        for dim, size in enumerate(shape):
            if size != copy.shape[dim]:
                copy = copy.narrow(dim, 0, size)
        return copy


def shell_of(hand_out: Handout) -> Shell | None:
    """What hands out over storages of its own; None for what makes copies."""
    shell = getattr(hand_out, "__self__", None)
    return shell if isinstance(shell, Shell) else None


def handing_out(shell: Shell, handed_out: HandedOut) -> tuple[Any, ...]:
    """What `NativeReplay` hands out by, as `Shell` does, into `handed_out`."""
    looks = storage_use_count, getweakrefcount, is_inference_mode_enabled
    return shell, Shell, handed_out, *looks, _own_references()


def _own_references() -> int:
    """How many of the references that `Shell` counts of a storage are there as it counts them."""
    storage = object()
    return getrefcount(storage)


@cache
def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What makes tensors of its dtype and device faster than anything else."""
    with inference_guard(False):
        return torch.empty(0, dtype=dtype, device=device)


class Shell:
    """Hands out one output over storages that own nothing of its memory.

    What is handed out at a step is made unreadable after it if anybody still has it: tensor, view
    or storage. Mostly nobody has, and the storage serves the next step too: to make another one,
    and to mark this one, takes four times as long as a tensor over it.
    """

    __slots__ = (
        "__weakref__",
        "_address",
        "_alone",
        "_bases",
        "_cdata",
        "_device",
        "_empty",
        "_left",
        "_nbytes",
        "_of_first",
        "_of_one",
        "_offset",
        "_owner",
        "_references",
        "_storage",
        "_stride",
        "_was_held",
    )

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._address = storage.data_ptr()
        self._nbytes = storage.nbytes()
        self._device = tensor.device
        self._offset = tensor.storage_offset()
        self._stride = tensor.stride()
        self._empty = _empty(tensor.dtype, tensor.device)
        # The memory itself, wherever `tensor` may be moved to; of pool memory only an alias.
        self._owner = tensor.detach()
        # What is over the memory that steps hand out, and tensors over it that nobody else has, by
        # whether they were made in inference mode, and by shape; how many references to the storage
        # are these, and how many to its Python object, which is one for all; how many a storage
        # without tensors has, and with the first; and for how many steps it serves yet.
        self._storage: torch.UntypedStorage | None = None
        self._bases: _Bases = ({}, {})
        self._cdata = self._alone = self._references = self._left = 0
        self._of_one = self._of_first = 0, 0
        self._was_held = False

    def hand_out(self, shape: tuple[int, ...], handed_out: HandedOut) -> torch.Tensor:
        """This step's output in a shape; noted in `handed_out`, which expires before the next."""
        handed_out.append(self)
        base = self._bases[is_inference_mode_enabled()].get(shape)
        # A tensor of its own, whatever the last one was changed to, over the same storage.
        return self._anew(shape) if base is None else base.data

    def storage(self) -> torch.UntypedStorage:
        """What the last tensor was handed out over."""
        assert self._storage is not None
        return self._storage

    def owns(self, cdata: int) -> bool:
        """Whether this is the storage of what it hands out now."""
        return self._storage is not None and self._cdata == cdata

    def is_held(self) -> bool:
        """Whether anybody else has the storage: a tensor, a view, or itself. One that is over other
        memory by now, has been given anything or is watched for its end, is theirs too."""
        storage = self._storage
        if storage is None:
            return False
        self._left -= 1
        return (
            storage_use_count(self._cdata) != self._alone
            or getrefcount(storage) != self._references
            or storage.data_ptr() != self._address
            or self._left < 0
            or bool(storage.__dict__)
            or getweakrefcount(storage) != 0
        )

    def give_up(self) -> None:
        """Make the storage unreadable, and leave it to who has it."""
        if any(self._bases):
            _shells.pop(self._cdata, None)
        mark_unreadable(self._cdata, _OVERWRITTEN)
        self._storage = None
        self._bases = {}, {}
        self._was_held = True

    def _anew(self, shape: tuple[int, ...]) -> torch.Tensor:
        """The first tensor of a shape over a storage."""
        bases = self._bases[is_inference_mode_enabled()]
        # Nothing is prepared for a host that keeps its outputs till it has the next ones.
        alone = len(bases) >= _CACHED_VIEWS or (self._storage is None and self._was_held)
        self._was_held = False
        if self._storage is None:
            storage = storage_at(self._address, self._device, self._nbytes)
            # Its name before itself: whatever interrupts this, the right one is marked.
            self._cdata = storage._cdata
            self._storage = storage
            del storage
            self._left = _MOST_STEPS
            if not any(self._of_one):
                self._of_one = self._counted()
            self._alone, self._references = self._of_one
        if alone:
            return self._over(self._storage, shape)
        # No mode may see, and keep, what only this has.
        with without_dispatch_modes():
            base = self._over(self._storage, shape)
        # Counted once, when nobody can have any yet: it is the same for every storage.
        if not any(self._of_first):
            self._of_first = self._counted()
        if any(self._bases):
            self._alone += 1
        else:
            self._alone, self._references = self._of_first
            _shells[self._cdata] = self
        bases[shape] = base
        return base.data

    def _counted(self) -> tuple[int, int]:
        """The references to the storage, and to its Python object where `is_held` asks for them."""
        storage = self._storage
        return storage_use_count(self._cdata), getrefcount(storage)

    def _over(self, storage: torch.UntypedStorage, shape: tuple[int, ...]) -> torch.Tensor:
        fresh: torch.Tensor = self._empty.new()
        return fresh.set_(storage, self._offset, shape, self._stride)


class View:
    """Hands out another tensor over the storage that a shell has just handed out."""

    __slots__ = ("_empty", "_offset", "_shell", "_stride")

    def __init__(self, shell: Shell, tensor: torch.Tensor) -> None:
        self._shell = shell
        self._empty = _empty(tensor.dtype, tensor.device)
        self._offset = tensor.storage_offset()
        self._stride = tensor.stride()

    def hand_out(self, shape: tuple[int, ...], handed_out: HandedOut) -> torch.Tensor:
        """Its step's tensor, which expires with what the shell has handed out."""
        fresh: torch.Tensor = self._empty.new()
        return fresh.set_(self._shell.storage(), self._offset, shape, self._stride)


# By the storage that each has. A name is given again once its storage is gone, so a shell is asked.
_shells: WeakValueDictionary[int, Shell] = WeakValueDictionary()


class CudaShell(Shell):
    """The same by one call of torch, made for its own graphs, in place of two."""

    __slots__ = ("_described",)

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self._described: dict[tuple[int, ...], dict[str, Any]] = {}

    def _over(self, storage: torch.UntypedStorage, shape: tuple[int, ...]) -> torch.Tensor:
        described = self._described.get(shape)
        if described is None:
            described = self._describe(shape)
        return tensor_over(described, storage)

    def _describe(self, shape: tuple[int, ...]) -> dict[str, Any]:
        described = {
            "size": shape,
            "stride": self._stride,
            "storage_offset": self._offset,
            "dtype": self._empty.dtype,
            "device": self._device,
            "data_ptr": self._address,
            "nbytes": self._nbytes,
        }
        if len(self._described) < _CACHED_VIEWS:
            self._described[shape] = described
        return described
