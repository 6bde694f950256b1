"""What cannot be part of a graph because it depends on the data: refused while capturing."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from graphrt.core.base import IN_PIECES, CaptureSyncError, RefusedOpError, fork_safe
from graphrt.core.capture import user_source
from graphrt.cpu.private_torch import replace_reads
from graphrt.cpu.tape.operators import Operator

_READ_ADVICE = (
    "keep the value on the device (torch.where, masked arithmetic), pass it in as an argument of "
    f"the step, or {IN_PIECES}"
)
_CHECK_ADVICE = (
    "use the variant that raises nothing (torch.linalg.inv_ex, solve_ex, cholesky_ex, "
    f"lu_factor_ex, ldl_factor_ex), or {IN_PIECES}"
)
VALUE_READS = frozenset(
    "aten::" + name for name in ("_local_scalar_dense", "allclose", "equal", "is_nonzero", "item")
)
"""They read values and do nothing else: those of constants are the same at every replay."""
INDEXED = frozenset({"aten::index", "aten::index_put", "aten::index_put_"})
"""They take masks as indices: those that are constants choose the same places at every replay."""
_SYNC_OPS = VALUE_READS | {"aten::_linalg_check_errors", "aten::_pack_padded_sequence"}
_HOST_TYPES = frozenset({"int", "float", "bool", "number", "complex", "SymInt"})
MASK_DTYPES = frozenset({torch.bool, torch.uint8})
_SHAPE_ADVICE = {
    "aten::nonzero": "use torch.nonzero_static(size=...), or torch.where(mask, x, y)",
    "aten::masked_select": "use torch.where(mask, x, fill), which keeps the shape",
    "aten::index": "use torch.where(mask, x, fill), or index with integers of a fixed count",
    "aten::index_put": "write with torch.where(mask, new, old), or with masked_fill_",
    "aten::index_put_": "write with torch.where(mask, new, old), or with masked_fill_",
    "aten::repeat_interleave": "pass output_size=, which fixes the shape",
    "aten::bincount": "use scatter_add_ into a tensor of fixed size",
}
_COLLECTIVES = ("c10d::", "_c10d_functional::")
_STATIC_SHAPE_ADVICE = f"pad it to a fixed size, or {IN_PIECES}"

_Refusal = Callable[[Operator, tuple[Any, ...], dict[str, Any]], None]


@functools.cache
def refusal_of(op: Operator) -> _Refusal | None:
    """What raises if a call reads data on the host, its output shape depends on data, or it goes on
    behind the call; None for an operator of which no call does. Read once per overload."""
    if op.name.startswith(_COLLECTIVES):
        return _refuse_collective
    if op.name in _SYNC_OPS or torch.Tag.data_dependent_output in op.tags:
        return _refuse_operator
    if op.name in INDEXED:
        return _refuse_masks
    if op.name == "aten::repeat_interleave":
        return None if op.label.endswith("self_int") else _refuse_repeats
    if torch.Tag.dynamic_output_shape in op.tags:
        return _refuse_dynamic_shape
    if not op.built_in and _returns_host_values(op):
        return _refuse_operator
    return None


def _refuse_collective(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    raise RefusedOpError(
        "a collective goes on behind the call, and a replay would not wait for it",
        op=op.label,
        source=_where(),
        advice=f"of it and its wait: {IN_PIECES}",
    )


def _refuse_operator(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    check = op.name == "aten::_linalg_check_errors"
    _refuse_read(op.label, _CHECK_ADVICE if check else _READ_ADVICE)


def _refuse_masks(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _masks(op, args, kwargs):
        _refuse_shape(op, "a boolean mask as an index gives a shape that depends on data")


def _refuse_repeats(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_size") is None:
        _refuse_shape(op, "repeats in a tensor give a shape that depends on data")


def _refuse_dynamic_shape(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    _refuse_shape(op, "the shape of the output depends on data")


def _masks(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    indices = args[1] if len(args) > 1 else kwargs["indices"]
    if not any(i is not None and i.dtype in MASK_DTYPES for i in indices):
        return False
    if op.name == "aten::index":
        return True
    values = args[2] if len(args) > 2 else kwargs["values"]
    # One value for the whole mask is a masked fill: nothing has a shape that depends on data.
    return bool(values.numel() != 1)


def _returns_host_values(op: Operator) -> bool:
    return any(str(r.type) in _HOST_TYPES for r in op.schema.returns)


def _refuse_read(operator: str, advice: str = _READ_ADVICE) -> NoReturn:
    raise CaptureSyncError(
        "the forward read tensor data on the host while it was being captured",
        op=operator,
        source=_where(),
        advice=advice,
    )


def _refuse_shape(op: Operator, why: str) -> NoReturn:
    raise RefusedOpError(
        why,
        op=op.label,
        source=_where(),
        advice=_SHAPE_ADVICE.get(op.name, _STATIC_SHAPE_ADVICE),
    )


def _where() -> str | None:
    source = user_source()
    return None if source is None else str(source)


# Reads that do not go through the dispatcher. A function mode would see them too, but torch takes
# it off its stack while it handles a call, and a segment may end inside of one. So the methods are
# replaced while a capture is open, and refuse on the threads that capture.
_HOST_READS = (
    "__array__",
    # torch.tensor([t]), and what else makes a tensor of a list, asks its elements for numbers.
    "__bool__",
    "__complex__",
    "__dlpack__",
    "__float__",
    "__format__",
    "__index__",
    "__int__",
    "__reduce_ex__",
    "__repr__",
    "numpy",
    "tensor_split",
    "tolist",
)

_COPYING_READS = frozenset(
    ("__bool__", "__complex__", "__float__", "__format__", "__index__", "__int__", "tolist")
)
"""Of these reads the forward keeps no memory: those of constants are allowed."""

_WRAPPERS = ("frombuffer", "from_dlpack", "load")
"""They make tensors of memory that no operator wrote."""

_lock = fork_safe(threading.Lock())
# Those that are open, by name and not counted: closing twice changes nothing.
_open: set[int] = set()
_restores: list[Callable[[], None]] = []
_thread = threading.local()


class HostReads:
    """Refuses the reads of this thread that no operator shows, from `open` to `close`."""

    def __init__(self, wrapped: Callable[[Any], None], are_constant: Callable[[Any], bool]) -> None:
        """`wrapped` is called with what was made of the host's memory, `are_constant` says whether
        arguments have the same values at every replay."""
        self._wrapped = wrapped
        self._are_constant = are_constant

    def open(self) -> None:
        _thread.refusing = True
        _thread.wrapped = self._wrapped
        _thread.are_constant = self._are_constant
        with _lock:
            _open.add(id(self))
            if not _restores:
                functions = ("tensor_split", *_WRAPPERS)
                replace_reads(_HOST_READS, functions, _guarded, _restores)

    def close(self) -> None:
        """Allow them again; it may be called again, and where `open` came half-way."""
        _thread.refusing = False
        _thread.wrapped = _thread.are_constant = None
        with _lock:
            _open.discard(id(self))
            while _restores and not _open:
                _restores[-1]()
                _restores.pop()

    def pause(self) -> Callable[[], None]:
        """Allow reads until the returned function is called."""
        _thread.refusing = False
        return self._resume

    def _resume(self) -> None:
        _thread.refusing = True


@contextmanager
def reads_allowed() -> Iterator[None]:
    """Nothing is refused on this thread inside of the block."""
    before = getattr(_thread, "refusing", False)
    _thread.refusing = False
    try:
        yield
    finally:
        _thread.refusing = before


# Made once: every segment puts the same guards in place of the same methods.
@functools.lru_cache(maxsize=4 * (len(_HOST_READS) + len(_WRAPPERS)))
def _guarded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if getattr(_thread, "refusing", False) and _reads(name, args, kwargs):
            _refuse_read(f"Tensor.{name}")
        result = original(*args, **kwargs)
        if name in _WRAPPERS and getattr(_thread, "refusing", False):
            _thread.wrapped(result)
        return result

    return guarded


def _reads(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in _WRAPPERS:
        return False
    if name in _COPYING_READS and _thread.are_constant(args):
        return False
    if name != "tensor_split":
        return True
    # With sections or indices in a tensor it reads them through a pointer.
    return any(isinstance(v, torch.Tensor) for v in (*args[1:2], *kwargs.values()))
