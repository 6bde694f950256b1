"""Refuses what no tape can replay because it depends on data: rules for operators, and guards of
host reads that call no operator, such as `float(tensor)`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from graphrt.core.base._undo import ProcessChange
from graphrt.core.base.errors import IN_PIECES, CaptureSyncError, RefusedOpError
from graphrt.core.base.thread_mode import FREE_KEYS, free_key
from graphrt.core.base.torch_names import include_key, kernel_library, untraced
from graphrt.core.capture.refusals import Refusal
from graphrt.cpu.private_torch import replace_reads
from graphrt.cpu.tape.operators import Operator

VALUE_READS = frozenset(
    "aten::" + name for name in ("_local_scalar_dense", "allclose", "equal", "is_nonzero", "item")
)
"""They only read values. Reading a constant is allowed: its values are those of every replay."""
INDEXED = frozenset({"aten::index", "aten::index_put", "aten::index_put_"})
"""They take masks as indices. A constant mask has the same true elements at every replay."""
_SYNC_OPS = VALUE_READS | {"aten::_pack_padded_sequence"}
_HOST_TYPES = frozenset({"int", "float", "bool", "number", "complex", "SymInt"})
_COLLECTIVES = ("c10d::", "_c10d_functional::")

HOST_READ = Refusal(
    CaptureSyncError,
    "the forward read tensor data on the host while it was being captured",
    advice="keep the value on the device (torch.where, masked arithmetic), pass it in as an "
    f"argument of the step, or {IN_PIECES}",
)
_RESULT_CHECK = HOST_READ._replace(
    advice="use the variant that raises nothing (torch.linalg.inv_ex, solve_ex, cholesky_ex, "
    f"lu_factor_ex, ldl_factor_ex), or {IN_PIECES}"
)
_NESTED = HOST_READ._replace(
    what="a nested tensor was made of a mask, whose numbers give it its shape",
    advice="have nn.TransformerEncoder pad: enable_nested_tensor=False where it is made, or "
    f"use_nested_tensor = False on it (masked places are not zeroed then); or {IN_PIECES}",
)
ONE_HOT = HOST_READ._replace(
    what="torch.nn.functional.one_hot checks its numbers on the host",
    advice="compare: (x[..., None] == torch.arange(num_classes)).long()",
)
_COLLECTIVE = Refusal(
    RefusedOpError,
    "a collective goes on after its call returns, and a replay would not wait for it",
    advice=f"of it and its wait: {IN_PIECES}",
)
_DYNAMIC_SHAPE = Refusal(
    RefusedOpError,
    "the shape of the output depends on data",
    advice=f"pad it to a fixed size, or {IN_PIECES}",
)
_MASK_INDEX = _DYNAMIC_SHAPE._replace(
    what="a boolean mask as an index gives a shape that depends on data",
    advice="use torch.where(mask, x, fill), or index with integers of a fixed count",
)
_MASK_WRITE = _MASK_INDEX._replace(
    advice="write with torch.where(mask, new, old), or with masked_fill_"
)
_REPEATS = _DYNAMIC_SHAPE._replace(
    what="repeats in a tensor give a shape that depends on data",
    advice="pass output_size=, which fixes the shape",
)


CHOICE = HOST_READ._replace(
    what="torch.cond chooses a branch by a tensor's values: every replay would take the one of the "
    "capture",
    advice=f"compute both branches and choose with torch.where(condition, a, b), or {IN_PIECES}",
)
LOOP = HOST_READ._replace(
    what="while_loop ends by the values of a tensor: every replay would take as many turns as "
    "the capture",
    advice=f"use a Python loop of a fixed number of turns, with torch.where, or {IN_PIECES}",
)
HIGHER_ORDER = Refusal(
    RefusedOpError,
    "a higher-order operator of torch hides the operators that it calls from the capture",
    advice=f"call the function in it directly, in a Python loop where it loops, or {IN_PIECES}",
)
CHANGED_METADATA = Refusal(
    RefusedOpError,
    "the forward changes the shape or the memory of a tensor from outside of the capture in place: "
    "no replay repeats that",
    advice="change a view of it: x.unsqueeze(0), x.view(...)",
)
GROWN_TENSOR = Refusal(
    RefusedOpError,
    "graph memory never moves, so a tensor in it cannot grow",
    advice="allocate the tensor at its largest size",
)
OUTPUT_OF_NO_TAPE = Refusal(
    RefusedOpError,
    "only dense tensors on the CPU can be outputs of a captured operator",
    advice=IN_PIECES,
)
NESTED_ARGUMENT = Refusal(
    RefusedOpError,
    "an operator reads a nested tensor from outside of the capture, whose sizes graphs lack",
    advice=f"pad it before the capture (to_padded_tensor), or {IN_PIECES}",
)
UNREAD_VECTORS = Refusal(
    RefusedOpError,
    "singular or eigenvalues without their vectors come from another routine in eager code, with "
    "other bits",
    advice=f"use the vectors too (linalg.svd, eigh), or {IN_PIECES}",
)
WRITTEN_WRAP = Refusal(
    RefusedOpError,
    "memory that was wrapped inside of the capture is written: whether a replay should begin with "
    "its first values or with those of the step before cannot be told",
    advice="make the tensor before the capture (state), or of a copy: torch.tensor(array)",
)


class Rule(NamedTuple):
    """Which calls of an operator are refused, and how."""

    applies: Callable[[Operator], bool]
    """Whether the rule is for this operator. Only the first such rule of `_RULES` counts."""
    refusal: Refusal
    is_broken: Callable[[tuple[Any, ...], dict[str, Any]], bool] = lambda args, kwargs: True
    """Whether a call with these arguments breaks the rule."""


def _named(*names: str) -> Callable[[Operator], bool]:
    return lambda op: op.name.removeprefix("aten::") in names


MASK_DTYPES = frozenset({torch.bool, torch.uint8})


def _indexes_by_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    indices = args[1] if len(args) > 1 else kwargs["indices"]
    return any(i is not None and i.dtype in MASK_DTYPES for i in indices)


def _writes_by_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    values = args[2] if len(args) > 2 else kwargs["values"]
    # One value for the whole mask is a masked fill: nothing has a shape that depends on data.
    return _indexes_by_mask(args, kwargs) and bool(values.numel() != 1)


def _repeats_by_tensor(op: Operator) -> bool:
    return op.name == "aten::repeat_interleave" and not op.label.endswith("self_int")


def _has_no_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return kwargs.get("output_size") is None


def _has_dynamic_shape(op: Operator) -> bool:
    return torch.Tag.dynamic_output_shape in op.tags


def _reads_data(op: Operator) -> bool:
    return op.name in _SYNC_OPS or torch.Tag.data_dependent_output in op.tags


def _returns_host_values(op: Operator) -> bool:
    return not op.built_in and any(str(r.type) in _HOST_TYPES for r in op.schema.returns)


_RULES = (
    Rule(lambda op: op.name.startswith(_COLLECTIVES), _COLLECTIVE),
    Rule(_named("_linalg_check_errors"), _RESULT_CHECK),
    Rule(_named("_nested_tensor_from_mask_left_aligned", "_nested_tensor_from_mask"), _NESTED),
    Rule(_named("one_hot"), ONE_HOT),  # one operator under inference mode
    Rule(_reads_data, HOST_READ),
    Rule(_named("index"), _MASK_INDEX, _indexes_by_mask),
    Rule(_named("index_put", "index_put_"), _MASK_WRITE, _writes_by_mask),
    Rule(_repeats_by_tensor, _REPEATS, _has_no_size),
    *(
        Rule(_named(name), _DYNAMIC_SHAPE._replace(advice=advice))
        for name, advice in {
            "nonzero": "use torch.nonzero_static(size=...), or torch.where(mask, x, y)",
            "masked_select": "use torch.where(mask, x, fill), which keeps the shape",
            "bincount": "use scatter_add_ into a tensor of fixed size",
        }.items()
    ),
    Rule(_has_dynamic_shape, _DYNAMIC_SHAPE),
    Rule(_returns_host_values, HOST_READ),
)
"""Operators that read data on the host, have shapes that depend on data, or outlast the call."""


@functools.cache
def rule_of(op: Operator) -> Rule | None:
    """The rule for an operator, None where every call of it is fine. Read once per overload."""
    return next((rule for rule in _RULES if rule.applies(op)), None)


# Methods that read a tensor without the dispatcher. A function mode would see the calls, but torch
# takes it off its stack while it handles one, and a segment may end inside of that. So guards
# replace the methods while a capture is open, and refuse on the threads that capture.
_HOST_READS = (
    "__array__",
    # torch.tensor([t]), like other makers of a tensor from a list, calls these of its elements.
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
    "tolist",
)

_COPYING_READS = frozenset(
    ("__bool__", "__complex__", "__float__", "__format__", "__index__", "__int__", "tolist")
)
"""They return copies, so the forward may read constants by them."""

_WRAPPERS = ("frombuffer", "from_dlpack", "load")
"""Functions of torch that make a tensor over memory of the host."""

_thread = threading.local()


class HostReads:
    """Refuses host reads of this thread that call no operator, from `open` to `close`."""

    def __init__(self, wrapped: Callable[[Any], None], are_constant: Callable[[Any], bool]) -> None:
        """`wrapped` is called with each tensor that is made over memory of the host; `are_constant`
        says whether arguments have the same values at every replay."""
        self._wrapped = wrapped
        self._are_constant = are_constant

    def open(self) -> None:
        _thread.refusing = True
        _thread.wrapped = self._wrapped
        _thread.are_constant = self._are_constant
        include_key(_pointer_key(), True)
        guards.enter(self)

    def close(self) -> None:
        """Allow the reads again. May be called twice, and after an `open` that was interrupted."""
        _thread.refusing = False
        _thread.wrapped = _thread.are_constant = None
        include_key(_pointer_key(), False)
        guards.leave(self)


@contextmanager
def reads_allowed() -> Iterator[None]:
    """Nothing is refused on this thread inside of the block."""
    before = getattr(_thread, "refusing", False)
    _thread.refusing = False
    try:
        yield
    finally:
        _thread.refusing = before


# Cached: every segment of a capture installs the same guards again.
@functools.lru_cache(maxsize=4 * (len(_HOST_READS) + len(_WRAPPERS)))
def _guarded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if getattr(_thread, "refusing", False) and _is_refused(name, args, kwargs):
            raise HOST_READ(op=f"Tensor.{name}")
        result = original(*args, **kwargs)
        if name in _WRAPPERS and getattr(_thread, "refusing", False):
            _thread.wrapped(result)
        return result

    return guarded


guards = ProcessChange(partial(replace_reads, _HOST_READS, _WRAPPERS, _guarded))
"""Guards in place of the methods and functions, while any capture is open."""


def _is_refused(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in _WRAPPERS:
        return False
    return not (name in _COPYING_READS and _thread.are_constant(args))


# Composite operators that read a tensor through its pointer. Torch takes them apart before a mode
# sees them, so the tape would have their parts without the read. A kernel at a free dispatch key
# runs before theirs, and refuses.
_POINTER_READS: dict[str, int | None] = {
    "_pad_packed_sequence.default": 1,  # batch_sizes
    "gru.data": 1,
    "lstm.data": 1,
    "rnn_relu.data": 1,
    "rnn_tanh.data": 1,
    "tensor_split.tensor_indices_or_sections": 1,
    "_saturate_weight_to_fp16.default": None,
    "_sobol_engine_draw.default": None,
    "_sobol_engine_ff_.default": None,
    "_sobol_engine_initialize_state_.default": None,
    "_sobol_engine_scramble_.default": None,
    "choose_qparams_optimized.default": None,
    "fbgemm_linear_fp16_weight.default": None,
    "fbgemm_linear_fp16_weight.out": None,
    "fbgemm_linear_fp16_weight_fp32_activation.default": None,
    "fbgemm_linear_fp16_weight_fp32_activation.out": None,
    "fbgemm_linear_int8_weight.default": None,
    "fbgemm_linear_int8_weight_fp32_activation.default": None,
    "fbgemm_linear_quantize_weight.default": None,
    "fbgemm_pack_gemm_matrix_fp16.default": None,
    "fbgemm_pack_quantized_matrix.KN": None,
    "fbgemm_pack_quantized_matrix.default": None,
}
"""Operator -> position of the argument that it reads, which may be a constant. None: it also writes
its results by pointer, which no replay would repeat."""


@cache
def _pointer_key() -> Any:
    """The dispatch key at which these operators have a kernel that refuses, made at first use."""
    name = f"{FREE_KEYS}GenericWrapper"
    library = kernel_library("IMPL", "aten", name)
    _libraries.append(library)
    for path, position in _POINTER_READS.items():
        kernel = partial(_call_unless_refused, path, position)
        # True: the kernel gets the dispatch keys of its call as first argument.
        library.impl(path.removesuffix(".default"), name, kernel, True)
    return free_key(name)


_libraries: list[Any] = []
"""Kept for good: kernels end with their library."""


@untraced
def _call_unless_refused(
    path: str, position: int | None, keys: Any, *args: Any, **kwargs: Any
) -> Any:
    if getattr(_thread, "refusing", False) and (
        position is None or not _thread.are_constant(args[position])
    ):
        raise HOST_READ(op=f"aten.{path}")
    name, _, overload = path.partition(".")
    operator = getattr(getattr(torch.ops.aten, name), overload)
    return operator.redispatch(keys.remove(_pointer_key()), *args, **kwargs)
