"""Refuses calls whose arguments the traced code is not right for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from graphrt.compile.errors import RetraceError, TraceError
from graphrt.compile.trace.dims import DynamicDims, sizes_of, strides_at
from graphrt.compile.trace.parameters import Leaf
from graphrt.core.base.option_values import shown

SmallAxes = tuple[tuple[str, int], ...]
"""Axes of a call whose size is 0 or 1, with that size."""

_MOST_SIZES = 4096
"""So many checked combinations of sizes are remembered; then all are forgotten."""

_PROPERTIES = (
    "the type",
    "the layout",
    "whether it is conjugated, is negated, or requires gradients",
    "the dtype",
    "the device",
)


_Layout = tuple[tuple[int, ...], tuple[int, ...]]


class _Tensor(NamedTuple):
    """A tensor argument of the trace. `_PROPERTIES` names its `properties`; `shape` has None for a
    batch dimension; `layout` has the shape and the strides, None for a contiguous tensor."""

    properties: tuple[object, ...]
    shape: tuple[int | None, ...]
    layout: _Layout | None


class CallChecker:
    """Checks that a call's arguments have the properties that the trace has baked in.

    `conditions` are relations between sizes, with the lines that rely on them; `symbols` says how
    each symbol in them follows from the sizes of the axes: (axis, offset). `does_the_same` says
    whether the traced operators do at given sizes of axes what they did in the trace.
    `asks_for_gradients`: the forward's code reads `requires_grad`, on which no operator depends.
    `asks_for_strides`: it reads strides, so even the stride of a dimension of size 1 counts, on
    which no operator depends.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        dims: DynamicDims,
        conditions: Mapping[Any, str],
        symbols: Mapping[Any, tuple[str, int]],
        does_the_same: Callable[[Mapping[str, int]], bool],
        *,
        asks_for_gradients: bool = False,
        asks_for_strides: bool = False,
    ) -> None:
        self._dims = dims
        self._asks_for_strides = asks_for_strides
        self._asks_for_gradients = asks_for_gradients
        # Path of an argument -> its properties as a `_Tensor`; the value itself if it is none.
        self._expected = {leaf.path: self._describe(leaf) for leaf in leaves}
        self._symbols = dict(symbols)
        # Name of an axis -> the first argument that has it.
        self._argument_of: dict[str, str] = {}
        for leaf in leaves:
            for axis in dims.of(leaf).values():
                self._argument_of.setdefault(axis.name, leaf.path)
        self._conditions = conditions
        self._does_the_same = does_the_same
        # Sizes of all axes, which passed the check -> the axes that need code of their own.
        self._checked_sizes: dict[tuple[int, ...], SmallAxes] = {}
        # Axes of size 0 or 1 -> whether the general code is right for them.
        self._is_served: dict[SmallAxes, bool] = {}
        for condition in self._conditions:
            if unknown := condition.free_symbols - set(symbols):
                raise TraceError(
                    "the trace relies on a size that no argument says",
                    got=f"{condition}, where {', '.join(map(str, unknown))} is unknown",
                    advice="name the dimension in dynamic_dims, or make it a constant",
                )

    def check(self, leaves: Sequence[Leaf]) -> SmallAxes:
        """Raise `RetraceError`, which names the argument, if the code is not right for a call.

        Returns the axes of size 0 or 1 if the call needs code of its own for these; else ().
        """
        paths = [leaf.path for leaf in leaves]
        if paths != list(self._expected):
            changed = sorted(set(paths) ^ set(self._expected)) or paths
            raise _changed(changed[0], "the structure of the arguments", paths, [*self._expected])
        for leaf in leaves:
            self._check_leaf(leaf)
        sizes = sizes_of(self._dims, leaves)
        key = tuple(sizes.values())
        small = self._checked_sizes.get(key)
        if small is None:
            small = self._check_new_sizes(sizes)
            if len(self._checked_sizes) >= _MOST_SIZES:
                self._checked_sizes.clear()
            self._checked_sizes[key] = small
        return small

    def axes_needing_own_code(self, leaves: Sequence[Leaf]) -> SmallAxes:
        """The result of `check` for a call that passes it; looks at sizes only."""
        sizes = sizes_of(self._dims, leaves)
        small = self._checked_sizes.get(tuple(sizes.values()))
        if small is None:
            return self._check_new_sizes(sizes) if min(sizes.values(), default=2) < 2 else ()
        return small

    def ones_needing_own_code(self, leaves: Sequence[Leaf]) -> list[SmallAxes]:
        """Which axes need code of their own at a size of 1: each by itself, and all at once."""
        axes = list(sizes_of(self._dims, leaves))
        candidates: list[SmallAxes] = [((axis, 1),) for axis in axes]
        if len(axes) > 1:
            candidates.append(tuple((axis, 1) for axis in axes))
        return [small for small in candidates if not self._serves(small)]

    def _check_new_sizes(self, sizes: Mapping[str, int]) -> SmallAxes:
        """The axes of size 0 or 1, if the general code is wrong for these; else (). Raises
        `RetraceError` if it is wrong for larger sizes."""
        small = tuple((axis, size) for axis, size in sizes.items() if size < 2)
        if small and not (self._serves(small) and self._broken_condition(sizes) is None):
            return small
        self._check_sizes(sizes)
        return ()

    def _serves(self, small: SmallAxes) -> bool:
        """Whether the general code is right if these axes have size 1; never if one has size 0."""
        if small not in self._is_served:
            sizes = dict(small)
            values = {
                symbol: sizes[axis] + off
                for symbol, (axis, off) in self._symbols.items()
                if axis in sizes
            }
            self._is_served[small] = (
                0 not in sizes.values()
                # `!= False`: a condition that also has other symbols stays open here.
                and all(condition.subs(values) != False for condition in self._conditions)  # noqa: E712
                and self._does_the_same(sizes)
            )
        return self._is_served[small]

    def _describe(self, leaf: Leaf) -> Any:
        value = leaf.value
        if not isinstance(value, torch.Tensor):
            return value
        dims = self._dims.of(leaf)
        shape = tuple(None if dim in dims else n for dim, n in enumerate(value.shape))
        layout = None
        if value.layout is torch.strided:
            is_usual = value.is_contiguous()
            if self._asks_for_strides:
                # One row cut out of wider ones is contiguous, but has the stride of the wider rows.
                is_usual &= value.stride() == _new_strides(value.shape)
            layout = None if is_usual else (tuple(value.shape), value.stride())
        return _Tensor(self._properties_of(value), shape, layout)

    def _properties_of(self, value: torch.Tensor) -> tuple[object, ...]:
        kind = torch.Tensor if isinstance(value, torch.nn.Parameter) else type(value)
        gradients = self._asks_for_gradients and value.requires_grad
        flags = value.is_conj(), value.is_neg(), gradients
        return kind, value.layout, flags, value.dtype, value.device

    def _check_leaf(self, leaf: Leaf) -> None:
        path, value = leaf.path, leaf.value
        expected = self._expected[path]
        if not isinstance(expected, _Tensor):
            _check_constant(path, value, expected)
            return
        if not isinstance(value, torch.Tensor):
            raise _changed(path, "the type", type(value), expected.properties[0])
        properties = self._properties_of(value)
        if properties != expected.properties:
            both = zip(_PROPERTIES, properties, expected.properties, strict=True)
            raise next(_changed(path, *each) for each in both if each[1] != each[2])
        self._check_shape(path, value, expected.shape)
        if value.layout is torch.strided:
            self._check_strides(path, value, expected.layout)

    def _check_shape(
        self, path: str, value: torch.Tensor, expected: tuple[int | None, ...]
    ) -> None:
        if value.dim() != len(expected):
            raise _changed(path, "the number of dimensions", value.dim(), len(expected))
        for dim, (size, expected_size) in enumerate(zip(value.shape, expected, strict=True)):
            if expected_size is not None and size != expected_size:
                if not self._dims:
                    raise _another_size(path, dim, tuple(value.shape), expected)
                what = f"the size of dimension {dim}, which is no batch dimension"
                raise _changed(path, what, tuple(value.shape), _shape_text(expected))

    def _check_strides(self, path: str, value: torch.Tensor, layout: _Layout | None) -> None:
        strides = value.stride()
        if layout is not None:
            expected = strides_at(*layout, value.shape)
            both = zip(value.shape, strides, expected, strict=True)
            # No operator depends on the stride of a dimension of size 1.
            differ = value.numel() > 1 and any(n != 1 and ours != then for n, ours, then in both)
            if differ or (self._asks_for_strides and strides != expected):
                raise _changed(path, "the strides", strides, expected)
        elif not value.is_contiguous():
            raise _changed(path, "the strides", strides, "contiguous")
        elif self._asks_for_strides and strides != (usual := _new_strides(value.shape)):
            raise _changed(path, "the strides, which the forward asks for", strides, usual)

    def _broken_condition(self, sizes: Mapping[str, int]) -> Any:
        """The first condition that does not hold at these sizes."""
        values = {symbol: sizes[axis] + off for symbol, (axis, off) in self._symbols.items()}
        return next((each for each in self._conditions if each.subs(values) == False), None)  # noqa: E712

    def _check_sizes(self, sizes: Mapping[str, int]) -> None:
        condition = self._broken_condition(sizes)
        if condition is None:
            return
        names = sorted({self._symbols[s][0] for s in condition.free_symbols})
        named = condition.subs({s: axis_symbol(axis) for s, axis in self._symbols.items()})
        raise RetraceError(
            f"the number of {' and '.join(names)} is one that the forward decides by, and "
            "the other way was traced",
            input=self._argument_of.get(names[0], names[0]),
            got=", ".join(f"{name}={sizes[name]}" for name in names),
            expected=f"{named}, by {line}" if (line := self._conditions[condition]) else str(named),
            advice="plan graphs for sizes on one side alone (sizes=, max_num_reqs=): other batches "
            "then run uncompiled; or take the branch into an opaque operator",
            of_sizes=True,
        )


def _check_constant(path: str, value: object, expected: object) -> None:
    if isinstance(value, torch.Tensor) or (value is None) is not (expected is None):
        raise _changed(path, "the type", type(value), type(expected))
    if value is not expected and not _equal(value, expected):
        raise _changed(path, "a value that the code has baked in", value, expected)


def _new_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a new tensor of that shape. One row cut out of wider ones has another stride
    in its dimension of size 1, although it is contiguous."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _changed(path: str, what: str, got: object, expected: object) -> RetraceError:
    return RetraceError(
        f"argument {path} differs from the compiled call in {what}",
        input=path,
        got=_text(got),
        expected=_text(expected),
        advice="pass what was compiled for, name the dimension in dynamic_dims, or compile a "
        "second instance of the module",
    )


def _text(value: object) -> str:
    if isinstance(value, type):
        return value.__name__
    return value if isinstance(value, str) else repr(value)


def _another_size(
    path: str, dim: int, got: tuple[int, ...], expected: tuple[int | None, ...]
) -> RetraceError:
    return RetraceError(
        f"argument {path} has another size in dimension {dim} than the one that was compiled for, "
        "as dynamic_dims names no dimension",
        input=path,
        got=shown(got),
        expected=_shape_text(expected),
        advice="name the dimension in dynamic_dims; or serve this size alone, "
        f"sizes=[{expected[dim]}], and compile another instance for each other one",
        of_sizes=True,
    )


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float | complex):
        return repr(a) == repr(b)  # tells 0.0 from -0.0, and a NaN equals itself
    try:
        return bool(a == b)
    except (RuntimeError, TypeError, ValueError):
        return False  # an array, which compares element by element: refused as changed


def _shape_text(shape: Sequence[int | None]) -> str:
    return "(" + ", ".join("batch" if n is None else str(n) for n in shape) + ")"


def axis_symbol(axis: tuple[str, int]) -> Any:
    """The size of an axis plus an offset, for conditions in error texts."""
    import sympy  # type: ignore[import-untyped]

    name, offset = axis
    return sympy.Symbol(name, integer=True, positive=True) + offset


class Overlaps:
    """Refuses calls in which a tensor that the graph writes shares memory with another: none did in
    the trace. `written` are paths of the arguments that the graph writes; `writes_weights` says
    that it writes tensors of the module too."""

    def __init__(self, written: Collection[str], *, writes_weights: bool) -> None:
        self._written = frozenset(written)
        self._writes_weights = writes_weights

    @property
    def matter(self) -> bool:
        """Whether the graph writes any of them."""
        return bool(self._written) or self._writes_weights

    def check(self, leaves: Sequence[Leaf], weights: Mapping[str, torch.Tensor]) -> None:
        """Raise `RetraceError` if two tensors of a call share memory and the graph writes one."""
        tensors = [leaf for leaf in leaves if _has_memory(leaf.value)]
        for index, one in enumerate(tensors):
            for other in tensors[:index]:
                written = one.path in self._written or other.path in self._written
                if written and _overlap(one.value, other.value):
                    raise _overlapping(one.path, other.path)
            if one.path in self._written or self._writes_weights:
                for name, weight in weights.items():
                    if _has_memory(weight) and _overlap(one.value, weight):
                        raise _overlapping(one.path, f"the module's {name}")


def _has_memory(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors may have bytes in common. True also for some of different strides that
    only interleave."""
    first, last = _extent(one)
    other_first, other_last = _extent(other)
    if last <= other_first or other_last <= first:
        return False
    return not _side_by_side(one, other, other_first - first)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte, and of the byte after the last."""
    if not tensor.numel():
        return 0, 0
    both = zip(tensor.shape, tensor.stride(), strict=True)
    reach = sum((size - 1) * stride for size, stride in both) + 1
    first = tensor.data_ptr()
    return first, first + reach * tensor.element_size()


def _side_by_side(one: torch.Tensor, other: torch.Tensor, distance: int) -> bool:
    """Whether they are different columns of one matrix, which begin `distance` bytes apart."""
    if not one.dim() or one.dim() != other.dim() or one.dtype is not other.dtype:
        return False
    row = one.stride(0) * one.element_size()
    if other.stride(0) != one.stride(0) or not row:
        return False
    widths = []
    for tensor in (one, other):
        first, end = _extent(tensor[0])
        widths.append(end - first)
    offset = distance % row
    return widths[0] <= offset and offset + widths[1] <= row


def _overlapping(one: str, other: str) -> RetraceError:
    return RetraceError(
        f"argument {one} shares memory with {other}, and compiled code writes to one of them",
        input=one,
        got="overlapping memory",
        expected="tensors that are apart, as in the compiled call",
        advice="pass a clone, or compile with backend='eager'",
    )
