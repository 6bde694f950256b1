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
"""The shells whose outputs the last step handed out, and the next one expires."""

_Bases = tuple[dict[tuple[int, ...], torch.Tensor], dict[tuple[int, ...], torch.Tensor]]
"""shape -> a tensor over a shell's storage: those made outside of inference mode, and in it."""
_MOST_STEPS = 1024
"""Steps that one storage is used for. It keeps a list of the times that it was sent to other
processes, which would grow without end."""

_CACHED_SHAPES = 256
"""The most shapes of live rows that tensors are kept for; for others they are made at each step."""

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
    # After the loop: interrupted in it, the next call marks all of them again.
    handed_out.clear()


def is_spare(cdata: int) -> bool:
    """Whether a storage is kept for the next step's output, and no caller holds it."""
    shell = _shells.get(cdata)
    return shell is not None and shell.owns(cdata) and not shell.is_held()


Handout = Callable[[tuple[int, ...], HandedOut], torch.Tensor]
"""Makes a fresh tensor of some shape (the live rows) over the memory of one output."""


def handout_of(tensor: torch.Tensor, *, raw_storages: bool) -> Handout:
    """A function that hands out `tensor` at every step.

    Where torch can make it unreadable after the step, the caller gets a fresh tensor over a storage
    of its own; elsewhere, and where the device has no `raw_storages`, a copy.
    """
    if tensor.numel() == 0:
        return lambda shape, handed_out: tensor.new_empty(shape)
    if raw_storages and can_mark_unreadable and not tree.is_lazy(tensor):
        return Shell(tensor).hand_out
    # By one view, not a view of a view: while the interpreter shuts down, torch ends the process
    # when a tensor that has a view is freed.
    return lambda shape, handed_out: tensor.as_strided(shape, tensor.stride()).clone()


def _own_references() -> int:
    """How many of the references that `Shell` counts are those of the counting itself."""
    storage = object()
    return getrefcount(storage)


@cache
def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An empty tensor: its `new()` is the fastest way to a tensor of its dtype and device."""
    with inference_guard(False):
        return torch.empty(0, dtype=dtype, device=device)


class Shell:
    """Hands out one output at every step: a new tensor over a storage that points to the output's
    memory without owning it.

    Before the next step the storage is made unreadable if the caller still holds it, or a tensor or
    view over it. Mostly nobody does, and the storage serves the next step too: to make another one,
    and to mark this one, takes four times as long as a tensor over it.
    """

    # Slots, because C accesses them at fixed offsets.
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
        # An alias, as `tensor` may be given other memory later. It does not keep pool memory.
        self._like = tensor.detach()
        # Where the memory of the output begins.
        self._address = tensor.untyped_storage().data_ptr()
        self._empty = _empty(tensor.dtype, tensor.device)
        # The storage that tensors are handed out over, and the number by which torch names it.
        self._storage: Any = None
        self._cdata = 0
        # Tensors over it that are never handed out themselves, by inference mode and by shape: a
        # step's tensor is the `data` of one.
        self._bases: _Bases = ({}, {})
        # How many references there are to the storage, and to its Python object, while no caller
        # holds it; and both numbers for a storage with one base, counted once for all storages.
        self._alone = self._references = 0
        self._of_first = 0, 0
        # How many more steps the storage may be used for.
        self._left = 0
        # Whether the last storage was given up: then the host keeps outputs, and no base is made.
        self._was_held = False

    def hand_out(self, shape: tuple[int, ...], handed_out: HandedOut) -> torch.Tensor:
        """This step's output in a shape; noted in `handed_out`, which expires before the next."""
        handed_out.append(self)
        base = self._bases[is_inference_mode_enabled()].get(shape)
        # A new tensor over the same storage, as the caller may have changed the last one.
        return self._anew(shape) if base is None else base.data

    def owns(self, cdata: int) -> bool:
        """Whether this is the storage that it hands out tensors over now."""
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
        """Make the storage unreadable, and leave it to the caller that holds it."""
        if any(self._bases):
            _shells.pop(self._cdata, None)
        mark_unreadable(self._cdata, _OVERWRITTEN)
        self._storage = None
        self._bases = {}, {}
        self._was_held = True

    def _anew(self, shape: tuple[int, ...]) -> torch.Tensor:
        """The first tensor of a shape over a storage."""
        bases = self._bases[is_inference_mode_enabled()]
        # No base for a host that keeps its outputs until it has the next ones, nor for a step in
        # `__del__` at shutdown, when torch cannot import how modes are turned off.
        host_keeps = self._storage is None and self._was_held
        makes_no_base = host_keeps or len(bases) >= _CACHED_SHAPES or is_finalizing()
        self._was_held = False
        if self._storage is None:
            nbytes = self._like.untyped_storage().nbytes()
            storage = storage_at(self._address, self._like.device, nbytes)
            # `_cdata` first: after an interrupt no storage has the number of another one.
            self._cdata = storage._cdata
            self._storage = storage
            del storage
            self._left = _MOST_STEPS
            self._alone, self._references = self._counted()
        if makes_no_base:
            return self._over(shape)
        # A torch mode that saw the base could keep it, and then its storage would count as held.
        with without_dispatch_modes():
            base = self._over(shape)
        # Counted once, before any caller can hold it: it is the same for every storage.
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
        """The references to the storage, and to its Python object, as `is_held` counts them."""
        storage = self._storage
        return storage_use_count(self._cdata), getrefcount(storage)

    def _over(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A new tensor of a shape over the storage."""
        fresh: torch.Tensor = self._empty.new()
        like = self._like
        return fresh.set_(self._storage, like.storage_offset(), shape, like.stride())


# `_cdata` of a storage -> its shell. torch gives the number to another storage once the first is
# freed, so `Shell.owns` is asked too.
_shells: WeakValueDictionary[int, Shell] = WeakValueDictionary()


_Prepared = tuple[tuple[Handout, Shape, BatchDims], ...]
"""For each tensor of some outputs: what hands it out, its padded shape and its batch axes."""


def _live_shapes(prepared: _Prepared, tokens: int, reqs: int) -> list[Shape]:
    """The shape of the live rows of each tensor."""
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

    `descriptor` and `reqs` are the padded size, `handed_out` is the pool's. Without `raw_storages`
    the caller gets copies.
    """

    descriptor: BatchDescriptor
    reqs: int
    axes: OutputLayout
    handed_out: HandedOut
    raw_storages: bool
    # The outputs that the graph returns at every step; what hands out their tensors; and (live
    # tokens, live requests) -> the shapes of their live rows.
    graph_outputs: Any = None
    prepared: _Prepared = ()
    shapes: dict[tuple[int, int], list[Shape]] = field(default_factory=dict)
    # The identity of the output that pieces returned last, and what hands it out: often they return
    # the same memory again.
    last_prepared: tuple[Any, _Prepared] = (None, ())

    def hold(self, outputs: Any) -> None:
        """Prepare for steps that return exactly these outputs."""
        self.prepared = self._prepare(outputs)
        self.shapes = {}
        self.graph_outputs = outputs

    def single(self) -> tuple[Any, ...] | None:
        """The `outputs=` of `NativeReplay`, which hands out as `Shell.hand_out` does; None unless
        the graph's outputs are one tensor that a shell hands out."""
        if type(self.graph_outputs) is not torch.Tensor:
            return None
        shell = getattr(self.prepared[0][0], "__self__", None)
        if not isinstance(shell, Shell):
            return None
        looks = storage_use_count, getweakrefcount, is_inference_mode_enabled
        return shell, Shell, self.handed_out, *looks, _own_references()

    def live(self, outputs: Any, tokens: int, reqs: int) -> Any:
        """The live rows of this step's outputs, as the caller gets them."""
        if outputs is self.graph_outputs and outputs is not None:
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
        """What hands out outputs that an eager part or a piece returns: often the same memory as at
        the step before, maybe in another object."""
        # By identity: the same object may have been given other memory, or another shape.
        is_strided = type(outputs) is torch.Tensor and outputs.layout is torch.strided
        identity = tree.identity(outputs) if is_strided else None
        if identity is None or identity != self.last_prepared[0]:
            self.last_prepared = identity, self._prepare(outputs)
        return self.last_prepared[1]

    def _prepare(self, outputs: Any) -> _Prepared:
        """What hands out each tensor of these outputs; raises `OutputError`."""
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
