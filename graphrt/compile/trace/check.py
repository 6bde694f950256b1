"""Whether a call is one that the traced code is right for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from graphrt.compile.errors import RetraceError
from graphrt.compile.trace.dims import DynamicDims, sizes_of
from graphrt.compile.trace.parameters import Leaf


class _Tensor(NamedTuple):
    kind: type
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int | None, ...]
    strides: tuple[int | None, ...] | None


class CallChecker:
    """What the trace has baked in about its arguments, to hold calls against.

    `conditions` are relations between sizes; `symbols` says how each symbol in them follows from
    the sizes of the axes: (axis, offset).
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        dims: DynamicDims,
        conditions: Iterable[Any],
        symbols: Mapping[Any, tuple[str, int]],
    ) -> None:
        self._dims = dims
        self._expected = {leaf.path: self._describe(leaf) for leaf in leaves}
        self._symbols = dict(symbols)
        self._conditions = [
            condition
            for condition in conditions
            if condition.free_symbols <= set(symbols) and not _excludes_one(condition)
        ]
        self._known_sizes: set[tuple[int, ...]] = set()

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Raise `RetraceError`, which names the argument, if the code is not right for a call."""
        paths = [leaf.path for leaf in leaves]
        if paths != list(self._expected):
            changed = sorted(set(paths) ^ set(self._expected)) or paths
            raise _changed(changed[0], "the structure of the arguments", paths, [*self._expected])
        for leaf in leaves:
            self._check_leaf(leaf)
        sizes = sizes_of(self._dims, leaves)
        key = tuple(sizes.values())
        if key not in self._known_sizes:
            self._check_sizes(sizes)
            self._known_sizes.add(key)

    def _describe(self, leaf: Leaf) -> Any:
        value = leaf.value
        if not isinstance(value, torch.Tensor):
            return value
        dims = self._dims.of(leaf)
        shape = tuple(None if dim in dims else n for dim, n in enumerate(value.shape))
        strides = None if value.is_contiguous() else value.stride()
        return _Tensor(_kind(value), value.dtype, value.device, shape, strides)

    def _check_leaf(self, leaf: Leaf) -> None:
        path, value = leaf.path, leaf.value
        expected = self._expected[path]
        if not isinstance(expected, _Tensor):
            if value is not expected and not _equal(value, expected):
                raise _changed(path, "a value that the code has baked in", value, expected)
            return
        if not isinstance(value, torch.Tensor) or _kind(value) is not expected.kind:
            raise _changed(path, "the type", type(value).__name__, expected.kind.__name__)
        if value.dtype is not expected.dtype:
            raise _changed(path, "the dtype", value.dtype, expected.dtype)
        if value.device != expected.device:
            raise _changed(path, "the device", value.device, expected.device)
        if value.dim() != len(expected.shape):
            raise _changed(path, "the number of dimensions", value.dim(), len(expected.shape))
        for dim, (size, wanted) in enumerate(zip(value.shape, expected.shape, strict=True)):
            if wanted is not None and size != wanted:
                what = f"the size of dimension {dim}, which is no batch dimension"
                raise _changed(path, what, tuple(value.shape), _shape_text(expected.shape))
        if expected.strides is None:
            if not value.is_contiguous():
                raise _changed(path, "the strides", value.stride(), "contiguous")
        elif value.stride() != expected.strides and value.numel() > 1:
            raise _changed(path, "the strides", value.stride(), expected.strides)

    def _check_sizes(self, sizes: Mapping[str, int]) -> None:
        values = {symbol: sizes[axis] + off for symbol, (axis, off) in self._symbols.items()}
        for condition in self._conditions:
            if condition.subs(values) == False:  # noqa: E712  (of sympy's own type)
                names = sorted({self._symbols[s][0] for s in condition.free_symbols})
                named = condition.subs({s: _axis_symbol(self._symbols[s]) for s in values})
                raise RetraceError(
                    f"the number of {' and '.join(names)} is one that the forward decides by, and "
                    "the other way was traced",
                    input=self._argument_of(names[0]),
                    got=", ".join(f"{name}={sizes[name]}" for name in names),
                    expected=str(named),
                    advice="compile with a batch of the size that is served, or make the forward "
                    "take one way for all sizes",
                )

    def _argument_of(self, axis: str) -> str:
        for path, expected in self._expected.items():
            if isinstance(expected, _Tensor):
                probe = Leaf(path, torch.empty([1] * len(expected.shape), device="meta"))
                if any(found.name == axis for found in self._dims.of(probe).values()):
                    return path
        return axis


def _excludes_one(condition: Any) -> bool:
    """Whether a condition only says that a size is not 0 or 1: one trace serves those too."""
    kind = getattr(condition, "rel_op", None)
    return kind == "!=" and any(side in (0, 1) for side in condition.args)


def _changed(path: str, what: str, got: object, expected: object) -> RetraceError:
    return RetraceError(
        f"argument {path} differs from the compiled call in {what}",
        input=path,
        got=got if isinstance(got, str) else repr(got),
        expected=expected if isinstance(expected, str) else repr(expected),
        advice="pass what was compiled for, name the dimension in dynamic_dims, or compile a "
        "second instance of the module",
    )


def _kind(value: torch.Tensor) -> type:
    return torch.Tensor if isinstance(value, torch.nn.Parameter) else type(value)


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    try:
        return bool(a == b)
    except (RuntimeError, TypeError, ValueError):
        return False  # such as arrays, whose comparison is no single answer: refused as changed


def _shape_text(shape: Sequence[int | None]) -> str:
    return "(" + ", ".join("batch" if n is None else str(n) for n in shape) + ")"


def _axis_symbol(axis: tuple[str, int]) -> Any:
    import sympy  # type: ignore[import-untyped]

    name, offset = axis
    return sympy.Symbol(name, integer=True, positive=True) + offset
