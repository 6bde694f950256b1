"""Constants of a captured forward: what it makes on the host and copies to the device.

Some devices capture no copy from pageable memory, and `torch.tensor(0.0, device=x.device)`, a list
as an index or `torch.full((1,), 7.0).to(x.device)` is one. While a segment is open on such a device

1. torch makes tensors of Python data on the host, and copies them by an operator that modes see;
2. every tensor is known that the forward made on the host of nothing but Python data;
3. a copy of one to the device reads page-locked memory, which has the value and lives with the
   graph. Each replay copies it again, so that the forward may write the copy in place;
4. an operand without dimensions on the host is launched as its value, and a number that the
   forward reads from there is baked in too: each replay compares what they were computed of.

A NumPy array is Python data too, in memory that the host may write: each replay compares it first.
So is a constant that another capture in the pool has returned, as pieces of one step do.
A mask among indices is none: how many places it chooses is read on the host, which is an error.
Any other tensor of the host's that the forward did not make is no constant: the host may write it,
and no replay would see that. Its copy is an error, unless it is page-locked: then replays read it.

`Lifting` says in which captures this is done.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphrt.core.base import tree
from graphrt.core.base._undo import ProcessChange
from graphrt.core.base.errors import (
    BakedScalarError,
    CaptureError,
    PageableCopyError,
    RefusedOpError,
)
from graphrt.core.base.thread_mode import unseen
from graphrt.core.base.torch_names import is_made_on_host, make_on_host
from graphrt.core.capture import refusals
from graphrt.core.capture.operators import LIFT_FRESH
from graphrt.core.capture.refusals import Source, described, user_source
from graphrt.core.device.contract import DeviceGraph
from graphrt.core.replay.pool import GraphPool

_aten = torch.ops.aten
_READ = _aten._local_scalar_dense.default
_TO_COPY, _COPY = _aten._to_copy.default, _aten.copy_.default

_kept: WeakKeyDictionary[DeviceGraph, list[torch.Tensor]] = WeakKeyDictionary()
"""Graph -> the page-locked memory that it copies from. This lives as long as the graph and not its
entry: a graph may be running when its entry is dropped."""


Check: TypeAlias = Callable[[], None]
"""What a replay calls first; raises if memory that the graph has copied was written since."""


def _unchanged(tensor: torch.Tensor, source: Source | None = None) -> Check:
    """A check that raises `BakedScalarError` once the bytes of a host tensor have changed: the host
    may write it, such as the memory of a NumPy array."""
    held = _bytes_of(tensor)

    def check() -> None:
        if _bytes_of(tensor) != held:
            where = "" if source is None else f", at {source}"
            error = refusals.WRITTEN_CONSTANT(f"{described(tensor)}{where}")
            assert isinstance(error, BakedScalarError)
            error.by_part = False
            raise error

    return check


class _Made(NamedTuple):
    """A storage on the host that a capture made: checks of the `arrays` that it was computed from,
    and those of its `operands` that are no constants. Without such operands it is a constant."""

    storage: StorageWeakRef
    arrays: tuple[Check, ...]
    operands: tuple[torch.Tensor, ...] = ()


_returned: WeakKeyDictionary[GraphPool, dict[int, _Made]] = WeakKeyDictionary()
"""The constants that captures in a pool have returned."""


class Lifting:
    """Whether captures lift constants. To look at every operator doubles the time of a capture, and
    most forwards make none: so the first capture that needs it is repeated with it, and those after
    it do so at once. A wrapper without a runner begins with it, as no warm-up was watched.
    """

    def __init__(self, *, is_on: bool = False) -> None:
        self.is_on = is_on

    def told(self, constants: Constants | None) -> None:
        """After the first capture of a forward: its other sizes make constants if this one did."""
        self.is_on = constants is not None and constants.are_used

    def expect(self, reads_host: bool) -> None:
        """Before a capture: lift if a warm-up has read memory of the host, or there was none."""
        self.is_on |= reads_host

    def repeat(self) -> bool:
        """After a `PageableCopyError`: whether to capture again, with constants lifted."""
        was_on, self.is_on = self.is_on, True
        return not was_on

    @staticmethod
    def of(pool: GraphPool, lifting: Lifting | None) -> tuple[Constants | None, type[CaptureError]]:
        """The constants of one capture, None where none are lifted; and the error for a read of the
        caller's memory on the host."""
        if not pool.platform.needs_pinned_copies:
            return None, RefusedOpError
        if lifting is None or lifting.is_on:
            return Constants(pool), RefusedOpError
        return None, PageableCopyError


class Constants:
    """Keeps the constants of one capture in `pool` for its replays, as the module says.

    The capture calls `take` for its arguments; for each segment `begin`, `run` at each operator,
    `end` and `checks`; and `hand_on` for its result.
    """

    def __init__(self, pool: GraphPool) -> None:
        self._platform = pool.platform
        # key of a storage -> a constant that a capture in this pool has returned.
        self._returned = _returned.setdefault(pool, {})
        for key, made in list(self._returned.items()):
            if made.storage.expired():  # type: ignore[no-untyped-call]
                del self._returned[key]
        # key of a storage that the capture made on the host -> what it was made of. No other
        # storage gets the key while there is the weak reference.
        self._made: dict[int, _Made] = {}
        # Page-locked memory of the open segment's graph.
        self._pinned: list[torch.Tensor] = []
        # Checks for the open segment, in order, each once.
        self._arrays: dict[Check, None] = {}
        self.are_used = False
        """Whether a segment that has ended made, or read, memory of the host."""

    def begin(self, graph: DeviceGraph) -> None:
        """A segment begins, which `graph` will hold."""
        self._pinned = _kept[graph] = []
        self._arrays = {}
        _host_first.enter(self)

    def checks(self) -> list[Check]:
        """What replays of the segment that has ended call first: its arrays are compared with their
        bytes at the capture."""
        return [*self._arrays]

    def end(self) -> None:
        """The segment ends, or has failed; once more changes nothing."""
        self.are_used = self.are_used or bool(self._made or self._arrays or self._pinned)
        _host_first.leave(self)

    def hand_on(self, result: Any) -> None:
        """Keep the constants in a capture's result: the next piece may take them as arguments."""
        for tensor in tree.tensors(result):
            if _is_of_host(tensor) and self._is_constant(tensor):
                key = _key(tensor)
                self._returned[key] = self._made[key]

    def take(self, tensor: torch.Tensor) -> bool:
        """Whether an argument is a constant that another capture has returned. The host may write
        it, so replays compare it."""
        if not _is_of_host(tensor):
            return False
        made = self._made.get(_key(tensor)) or self._returned.get(_key(tensor))
        if made is not None:
            arrays = (*made.arrays, _unchanged(tensor))
            self._made[_key(tensor)] = made._replace(arrays=arrays)
        return made is not None

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Issue an operator; what it copies from the host is copied from page-locked memory."""
        if func is _TO_COPY:
            return self._to_copy(func, args, kwargs)
        if func is _COPY:
            return self._copy(func, args, kwargs)
        if func in _MIXED:
            return self._mixed(func, args, kwargs)
        for value in (*args, *kwargs.values()):
            # A number in a tensor on the host, as in `x + torch.tensor(2.0)`: see 4 above.
            if (
                type(value) is torch.Tensor
                and value.is_cpu
                and not value.dim()
                # Beside tensors of the device, its value is an argument of the kernel.
                and not all(each.is_cpu for each in tree.tensors(args, kwargs))
            ):
                self._arrays |= dict.fromkeys(self._arrays_behind(value))
        if func is _READ and _is_of_host(args[0]):
            self._arrays |= dict.fromkeys(self._arrays_behind(args[0]))
        return self._as_it_is(func, args, kwargs)

    def _arrays_behind(self, tensor: torch.Tensor) -> Sequence[Check]:
        """Checks of the memory that a host tensor was computed from, by any number of operators,
        and that the host may still write."""
        made = self._made.get(_key(tensor))
        if made is None:
            return [_unchanged(tensor, user_source())]
        of_operands = (self._arrays_behind(each) for each in made.operands)
        return [*made.arrays, *(array for arrays in of_operands for array in arrays)]

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note which arrays and tensors results on the host were made of: what is made of nothing
        but constants is a constant itself."""
        results = {_key(each): each for each in tree.tensors(result) if _is_of_host(each)}
        if not results:
            return
        arrays: Iterable[Check]
        not_constant: tuple[torch.Tensor, ...] = ()
        if func is LIFT_FRESH:
            # A storage that cannot be resized is a NumPy array's: the host may write it.
            shared = [each for each in results.values() if not each.untyped_storage().resizable()]
            arrays = [_unchanged(each, user_source()) for each in shared]
        else:
            operands = [each for each in tree.tensors(args, kwargs) if _is_of_host(each)]
            not_constant = tuple(each for each in operands if not self._is_constant(each))
            constants = [self._made[_key(each)] for each in operands if self._is_constant(each)]
            arrays = (array for constant in constants for array in constant.arrays)
        checks, not_new = tuple(dict.fromkeys(arrays)), set(map(_key, not_constant))
        for key, each in results.items():
            if key not in not_new:
                ref = StorageWeakRef(each.untyped_storage())  # type: ignore[no-untyped-call]
                self._made[key] = _Made(ref, checks, not_constant)

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor on the host was made of nothing but constants."""
        made = self._made.get(_key(tensor))
        return made is not None and not made.operands

    def _on_device(
        self, func: Any, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor:
        """What a copy of `tensor` from the host to the device gives, as captured."""
        if not self._is_constant(tensor):
            raise refusals.PAGEABLE_COPY(described(tensor), op=func)
        arrays = self._made[_key(tensor)].arrays
        for check in arrays:
            check()
        self._arrays |= dict.fromkeys(arrays)
        made = torch.empty_like(tensor, dtype=dtype, device=device)
        if made.numel():
            made.copy_(unseen(lambda: self._pin(tensor, made)), non_blocking=True)
        return made

    def _pin(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Page-locked memory with a tensor's value now, and the dtype and strides of `like`."""
        buffer = self._platform.host_buffer(like.numel() * like.element_size())
        self._pinned.append(buffer)
        pinned = buffer.view(like.dtype).as_strided(like.shape, like.stride())
        return pinned.copy_(tensor.detach())

    def _is_copied(self, tensor: object, device: torch.device) -> bool:
        """Whether a copy of it to this device needs page-locked memory that outlives the capture:
        it is pageable, or a constant, whose memory the forward frees."""
        return (
            isinstance(tensor, torch.Tensor)
            and device.type == self._platform.device_type
            and _is_of_host(tensor)
            and (self._is_constant(tensor) or not tensor.is_pinned())
        )

    # Operators that copy from the host --------------------------------------------------------

    def _to_copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensor, device = args[0], kwargs.get("device")
        if device is None or not self._is_copied(tensor, torch.device(device)):
            return self._as_it_is(func, args, kwargs)
        made = self._on_device(func, tensor, device, kwargs.get("dtype") or tensor.dtype)
        memory_format = kwargs.get("memory_format")
        if memory_format in (None, torch.preserve_format):
            return made
        return made.contiguous(memory_format=memory_format)

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not self._is_copied(args[1], args[0].device):
            return self._as_it_is(func, args, kwargs)
        made = self._on_device(func, args[1], args[0].device, args[0].dtype)
        return func(args[0], made)

    def _mixed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operator that copies CPU arguments to the device of its other arguments in its own
        kernel. No dispatch mode sees that copy, so the arguments are copied before the call."""
        devices = [each.device for each in tree.tensors(args, kwargs) if not each.is_cpu]
        if not devices:
            return self._as_it_is(func, args, kwargs)

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            if not self._is_copied(tensor, devices[0]):
                return tensor
            return self._on_device(func, tensor, devices[0], tensor.dtype)

        args, kwargs = tree.map_leaves(moved, (args, kwargs))
        return func(*args, **kwargs)

    def _as_it_is(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Issue an operator, and note what its results on the host were made of."""
        result = func(*args, **kwargs)
        if result.is_cpu if type(result) is torch.Tensor else isinstance(result, list | tuple):
            self._note(func, args, kwargs, result)
        return result


def _bytes_of(tensor: torch.Tensor) -> bytes:
    whole = tensor if tensor.is_contiguous() else unseen(tensor.detach().contiguous)
    return ctypes.string_at(whole.data_ptr(), whole.nbytes)


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _is_of_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and type(tensor) is torch.Tensor


# These move an operand on the host to the device of the others.
_MIXED = (
    *(_aten.index.Tensor, _aten._unsafe_index.Tensor, _aten.index_put.default),
    *(_aten.index_put_.default, _aten._index_put_impl_.default, _aten.where.self),
)


def _make_on_host(undone_by: list[Callable[[], object]]) -> None:
    undone_by.append(partial(make_on_host, is_made_on_host()))
    make_on_host(True)


# This is for all threads: others get the same tensors, by one operator more.
_host_first = ProcessChange(_make_on_host)
"""Has torch make tensors of Python data on the host first."""
