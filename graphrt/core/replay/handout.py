"""Outputs as the caller gets them: fresh tensors over memory that the next step writes again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from sys import getrefcount, is_finalizing
from typing import Any
from weakref import WeakValueDictionary, getweakrefcount

import torch
from torch import is_inference_mode_enabled

from graphrt.core.base import tree
from graphrt.core.base.errors import OutputError
from graphrt.core.base.torch_names import (
    can_mark_unreadable,
    inference_guard,
    mark_unreadable,
    storage_at,
    storage_use_count,
    without_dispatch_modes,
)
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.inputs.outputs import BatchDims, OutputLayout, at_path, check_tensor

Shape = tuple[int, ...]

HandedOut = list["Shell"]
"""What the last step handed out, with what keeps its memory till the next."""

_Bases = tuple[dict[tuple[int, ...], torch.Tensor], dict[tuple[int, ...], torch.Tensor]]
_MOST_STEPS = 1024
"""Steps that one storage serves: sent to other processes at each, it would keep a growing list of
them."""

_CACHED_SHAPES = 256
"""Beyond so many shapes of live rows what hands them out is made at each step."""

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
    if raw_storages and can_mark_unreadable and not tree.is_lazy(tensor):
        return Shell(tensor).hand_out
    # By one view: while the interpreter shuts down, torch ends the process where a tensor goes that
    # has a view.
    return lambda shape, handed_out: tensor.as_strided(shape, tensor.stride()).clone()


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

    # C knows where in an object these are.
    __slots__ = (
        "__dict__",
        "__weakref__",
        "_address",
        "_alone",
        "_bases",
        "_cdata",
        "_left",
        "_references",
        "_storage",
    )

    def __init__(self, tensor: torch.Tensor) -> None:
        # The memory itself, wherever `tensor` may be moved to; of pool memory only an alias.
        self._like = tensor.detach()
        self._address = tensor.untyped_storage().data_ptr()
        self._empty = _empty(tensor.dtype, tensor.device)
        # The storage that tensors are handed out over, and its name in torch.
        self._storage: Any = None
        self._cdata = 0
        # Tensors over it that are never handed out themselves, by inference mode and by shape: a
        # step's tensor is the `data` of one.
        self._bases: _Bases = ({}, {})
        # The references to the storage, and to its Python object, while nobody else has it; and
        # what both are in a storage with its first base.
        self._alone = self._references = 0
        self._of_first = 0, 0
        # For how many steps the storage serves yet.
        self._left = 0
        # Whether the last storage was given up: then its host keeps outputs, and no bases are made.
        self._was_held = False

    def hand_out(self, shape: tuple[int, ...], handed_out: HandedOut) -> torch.Tensor:
        """This step's output in a shape; noted in `handed_out`, which expires before the next."""
        handed_out.append(self)
        base = self._bases[is_inference_mode_enabled()].get(shape)
        # A tensor of its own, whatever the last one was changed to, over the same storage.
        return self._anew(shape) if base is None else base.data

    def owns(self, cdata: int) -> bool:
        """Whether this is the storage of what it hands out now."""
        return self._storage is not None and self._cdata == cdata

    def is_held(self) -> bool:
        """Whether the caller has the storage still: through a tensor, a view, or itself. A storage
        that was moved to other memory, has attributes or weak references counts as held too."""
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
        # Nothing is prepared for a host that keeps its outputs till it has the next ones, nor for a
        # step in `__del__` at shutdown, when torch cannot import how modes are turned off.
        keeps = self._storage is None and self._was_held
        alone = keeps or len(bases) >= _CACHED_SHAPES or is_finalizing()
        self._was_held = False
        if self._storage is None:
            nbytes = self._like.untyped_storage().nbytes()
            storage = storage_at(self._address, self._like.device, nbytes)
            # Its name before itself: whatever interrupts this, the right one is marked.
            self._cdata = storage._cdata
            self._storage = storage
            del storage
            self._left = _MOST_STEPS
            self._alone, self._references = self._counted()
        if alone:
            return self._over(shape)
        # No mode may see, and keep, what only this has.
        with without_dispatch_modes():
            base = self._over(shape)
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

    def _over(self, shape: tuple[int, ...]) -> torch.Tensor:
        fresh: torch.Tensor = self._empty.new()
        like = self._like
        return fresh.set_(self._storage, like.storage_offset(), shape, like.stride())


# By the `_cdata` of the storage that each has. torch gives that number to another storage once the
# first is gone, so `Shell.owns` is asked too.
_shells: WeakValueDictionary[int, Shell] = WeakValueDictionary()


_Prepared = tuple[tuple[Handout, Shape, BatchDims], ...]
"""What hands out each tensor of some outputs, its padded shape and its batch axes."""


def _live_shapes(prepared: _Prepared, tokens: int, reqs: int) -> list[Shape]:
    shapes = []
    for _, shape, dims in prepared:
        live = list(shape)
        for dim, axis in dims:
            live[dim] = axis.size(tokens, reqs)
        shapes.append(tuple(live))
    return shapes


@dataclass(eq=False, repr=False)
class LiveOutputs:
    """The live rows of what a forward returns at one size, as fresh tensors for the caller.

    It is that of a graph with room for `reqs`. `handed_out` is that of its pool; without
    `raw_storages` the caller gets copies.
    """

    descriptor: BatchDescriptor
    reqs: int
    axes: OutputLayout
    handed_out: HandedOut
    raw_storages: bool
    # The outputs that the graph returns at every step; what hands out their tensors; and the live
    # shapes of these, by live tokens and requests.
    held: Any = None
    prepared: _Prepared = ()
    shapes: dict[tuple[int, int], list[Shape]] = field(default_factory=dict)
    # The identity of what pieces returned last, and what hands it out: often they return the same
    # memory again.
    last: tuple[Any, _Prepared] = (None, ())

    def hold(self, outputs: Any) -> None:
        """Prepare for steps that return exactly these outputs."""
        self.prepared = self._prepare(outputs)
        self.shapes = {}
        self.held = outputs

    def single(self) -> tuple[Any, ...] | None:
        """What `NativeReplay` hands out by, as `Shell.hand_out` does, where the held outputs are
        one tensor over storages of its own; else None."""
        if type(self.held) is not torch.Tensor:
            return None
        shell = getattr(self.prepared[0][0], "__self__", None)
        if not isinstance(shell, Shell):
            return None
        looks = storage_use_count, getweakrefcount, is_inference_mode_enabled
        return shell, Shell, self.handed_out, *looks, _own_references()

    def live(self, outputs: Any, tokens: int, reqs: int) -> Any:
        """The live rows of this step's outputs, as the caller gets them."""
        if outputs is self.held and outputs is not None:
            prepared = self.prepared
            shapes = self.shapes.get((tokens, reqs))
            if shapes is None:
                shapes = _live_shapes(prepared, tokens, reqs)
                if len(self.shapes) < _CACHED_SHAPES:
                    self.shapes[tokens, reqs] = shapes
        else:
            prepared = self._prepare_again(outputs)
            shapes = _live_shapes(prepared, tokens, reqs)
        if type(outputs) is torch.Tensor:
            return prepared[0][0](shapes[0], self.handed_out)
        fresh = [
            hand_out(shape, self.handed_out)
            for (hand_out, _, _), shape in zip(prepared, shapes, strict=True)
        ]
        at_places = iter(fresh)
        return tree.map_leaves(lambda _: next(at_places), outputs)

    def _prepare_again(self, outputs: Any) -> _Prepared:
        """What hands out outputs that no graph returns, but an eager part or a piece does: often
        the same memory as at the step before, though maybe in another object."""
        # The same object may have been given other memory, or another shape.
        alone = type(outputs) is torch.Tensor and outputs.layout is torch.strided
        identity = tree.identity(outputs) if alone else None
        if identity is None or identity != self.last[0]:
            self.last = identity, self._prepare(outputs)
        return self.last[1]

    def _prepare(self, outputs: Any) -> _Prepared:
        prepared = []
        for path, leaf in tree.leaves(outputs):
            if isinstance(leaf, torch.Tensor):
                check_tensor(path, leaf)
                self._check_rows(path, leaf)
                hand_out = handout_of(leaf, raw_storages=self.raw_storages)
                prepared.append((hand_out, tuple(leaf.shape), self.axes.batch_dims(path)))
        return tuple(prepared)

    def _check_rows(self, path: str, tensor: torch.Tensor) -> None:
        """Raise `OutputError` for a tensor without the rows that its declared axes give it."""
        for dim, axis in self.axes.batch_dims(path):
            rows = axis.size(self.descriptor.num_tokens, self.reqs)
            if tensor.dim() <= dim or tensor.shape[dim] != rows:
                raise OutputError(
                    f"the forward returns another number of rows than before{at_path(path)}",
                    got=f"shape {tuple(tensor.shape)} for [{self.descriptor}]",
                    expected=f"{rows} in dimension {dim}",
                    advice="return the same shape for every batch of one size",
                )
