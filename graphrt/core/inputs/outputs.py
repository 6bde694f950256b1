"""Which dimensions of what a forward returns are batch axes: declared, or seen at two sizes."""

from __future__ import annotations

import enum
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from operator import index
from typing import Any, NamedTuple

import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import InvalidOptionError, OutputError
from graphrt.core.base.option_values import shown, told
from graphrt.core.batch.axes import Axis

OutputAxes = tuple[Any, ...] | Mapping[str, Any] | None
"""Axes of an output, or of several by name or position: see `OutputLayout`."""

Declared = tuple[int | Axis | None, ...]
"""The axes of one tensor: a constant size, a batch axis, or None for a size that is not looked at.
Dimensions behind the last one are found."""


BatchDims = tuple[tuple[int, Axis], ...]
"""The dimensions of one tensor that are cut to the live rows."""

Probe = Callable[[int, int], object]

_FOUND = (Axis("tokens"), Axis("reqs"))
_VALUES = (numbers.Number, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size)


class Seen(NamedTuple):
    """The shapes, and the values that are no tensors, that a forward returned in a batch of so many
    tokens and requests, by path."""

    tokens: int
    reqs: int
    shapes: dict[str, tuple[int, ...]]
    values: dict[str, object]


class OutputLayout:
    """The batch axes of every tensor that a forward returns, by its path (`['logits']`, `[0]`)."""

    def __init__(self, declared: OutputAxes = None) -> None:
        """`declared` are the axes of a tensor, or a mapping of names (keys, or fields of a
        dataclass) to axes, or a tuple with the axes of each element. An axis is "tokens" (or
        "rows"), "reqs", either with a constant added, a constant size, or None for any size.

        What is not declared is found by comparing shapes at two sizes. Raises `InvalidInputError`
        for an axis that there is not, `InvalidOptionError` for anything else.
        """
        self._declared = _declared_axes(declared)
        self.forget()

    def see(self, tokens: int, reqs: int, outputs: Any) -> None:
        """Note what a forward returned; raises `OutputError` for what cannot be handed out."""
        check_containers(outputs)
        shapes: dict[str, tuple[int, ...]] = {}
        values: dict[str, object] = {}
        for path, leaf in tree.leaves(outputs):
            if isinstance(leaf, torch.Tensor):
                check_tensor(path, leaf)
                shapes[path] = tuple(leaf.shape)
            elif leaf is not None and not isinstance(leaf, _VALUES):
                raise OutputError(
                    f"the forward returns an object that graphrt cannot look into{at_path(path)}",
                    got=type(leaf).__qualname__,
                    expected="tensors, numbers and strings in tuples, lists, dicts and dataclasses",
                    advice="return the tensors in it, or leave it out: result.logits alone, or "
                    "use_cache=False, of a model of transformers",
                )
            else:
                values[path] = leaf
        seen = Seen(tokens, reqs, shapes, values)
        self._check_declared(seen, outputs)
        if self._seen:
            _check_alike(seen, self._seen[0])
        if self._resolved:
            # It has the axes that were found, or this raises.
            for path in shapes:
                _dims_of(path, [*self._seen, seen], self._axes(path))
        if (tokens, reqs) not in self._resolved and seen not in self._seen:
            self._seen.append(seen)

    def forget(self) -> None:
        """Forget what was seen."""
        # First: whatever interrupts this, what is not there any more does not count as resolved.
        self._resolved: set[tuple[int, int]] = set()
        self._seen: list[Seen] = []
        self._batch_dims: dict[str, BatchDims] = {}

    def batch_dims(self, path: str) -> BatchDims:
        """The dimensions to cut of the tensor at `path`; raises `OutputError` for one that was not
        there when axes were resolved."""
        try:
            return self._batch_dims[path]
        except KeyError:
            raise OutputError(
                f"the forward returns a tensor that it did not return before{at_path(path)}",
                expected=", ".join(self._batch_dims) or "no tensors",
                advice="return the same structure at every size and in every mode",
            ) from None

    def resolve(self, probe: Probe | None, *, query_len: int | None) -> None:
        """Find the batch axes of all tensors that were seen.

        Where one size was seen, or sizes that could be chance, `probe(tokens, reqs)` runs the
        forward at another one and lets this object see it; without it that is an error. `query_len`
        is the number of tokens of every request, where no graph is for other batches. Raises
        `OutputError` where it cannot be told.
        """
        if not self._seen or {(each.tokens, each.reqs) for each in self._seen} <= self._resolved:
            return
        failed = None if probe is None else self._compare(probe, query_len)
        unclear = self._unclear() if failed or probe is None else []
        if unclear:
            why = None if failed is None else f"{type(failed).__name__}: {failed}"
            raise unknown_axes(unclear[0], why) from failed
        self._batch_dims = {
            path: _dims_of(path, self._seen, self._axes(path)) for path in self._seen[0].shapes
        }
        self._resolved = {(each.tokens, each.reqs) for each in self._seen}

    def _compare(self, probe: Probe, query_len: int | None) -> Exception | None:
        """Look at other sizes until all is told by what was seen; returns what the forward raised
        where it did not run.

        One request of one token comes first, even where all seems told: three rows at 4 and 8
        tokens may be `x[:3]`, and what was seen at even sizes alone may be rounded up. A forward
        that does not run at that size has no steps of it either.
        """
        failed: Exception | None = None
        seen = {(each.tokens, each.reqs) for each in self._seen}
        unclear = self._unclear()
        for place, size in enumerate(self._other_sizes(query_len)):
            wanted = unclear or (place == 0 and self._may_bend(size[0]))
            if wanted and size not in seen:
                failed = _failed(probe, size) or failed
                unclear = self._unclear()
        return failed

    def _other_sizes(self, query_len: int | None) -> list[tuple[int, int]]:
        """Sizes of steps that tell tokens, requests and constants apart, the smallest first."""
        largest = max(self._seen, key=lambda seen: (seen.tokens, seen.reqs))
        tokens, reqs = largest.tokens, largest.reqs
        # Far from the largest first: of one token less, half as many rows may be as many.
        if query_len is not None:
            return [(few * query_len, few) for few in (1, reqs // 2, reqs - 1) if few > 0]
        sizes = [(few, 1) for few in (1, tokens // 2, tokens - 1) if few > 0]
        return [*sizes, (tokens, reqs - 1)] if reqs > 1 else sizes

    def _may_bend(self, smallest: int) -> bool:
        """Whether a dimension that looks constant may be smaller at `smallest` tokens: `x[:3]` has
        three rows at 4 and 8 tokens, and one at 1."""
        least = min(seen.tokens for seen in self._seen)
        return least > smallest and any(
            self._has_constant(path, least) for path in self._seen[0].shapes
        )

    def _has_constant(self, path: str, most: int) -> bool:
        declared = self._axes(path)
        sizes = zip_longest(self._seen[0].shapes[path], declared or (), fillvalue=0)
        return not declared or any(
            not isinstance(axis, Axis) and 1 < size <= most for size, axis in sizes
        )

    def _unclear(self) -> list[str]:
        unclear = [path for path in self._seen[0].shapes if self._is_unclear(path)]
        return unclear + self._unclear_values()

    def _unclear_values(self) -> list[str]:
        """What is no tensor, and may be another at another size."""
        values = self._seen[0].values if self._saw_one_size() else {}
        return [path for path, value in values.items() if value is not None]

    def _saw_one_size(self) -> bool:
        """Whether nothing is known of another size, and steps of another size are padded."""
        return {seen.tokens for seen in self._seen} == {self._seen[0].tokens} != {1}

    def _is_unclear(self, path: str) -> bool:
        """Whether a dimension has sizes that fit more than one axis, and no declaration tells."""
        declared = self._axes(path)
        if declared is None and self._saw_one_size():
            return True
        open_ones = [*_columns(path, self._seen)][len(declared or ()) :]
        return any(len(_fits(column, self._seen)) > 1 for column in open_ones)

    def _axes(self, path: str) -> Declared | None:
        """The declared axes of the tensor at `path`, None if there are none."""
        for prefix, axes in self._declared.items():
            if _is_of(prefix, path):
                return axes
        return None

    def _check_declared(self, seen: Seen, outputs: Any) -> None:
        for path in self._declared:
            if any(_is_of(path, each) for each in seen.shapes):
                continue
            keys = list(outputs) if isinstance(outputs, dict) else type(outputs).__name__
            raise OutputError(
                "the forward returns other outputs than outputs= names",
                got=keys,
                expected=f"an output {path}",
                advice="name the axes of what the forward returns",
            )
        for path, shape in seen.shapes.items():
            declared = self._axes(path)
            if declared is None:
                continue
            sizes = [
                axis.size(seen.tokens, seen.reqs) if isinstance(axis, Axis) else axis
                for axis in declared
            ]
            if len(sizes) > len(shape) or any(
                size is not None and size != actual
                for size, actual in zip(sizes, shape, strict=False)
            ):
                raise OutputError(
                    f"an output does not have the axes that outputs= gives it{at_path(path)}",
                    got=f"shape {shape} with {seen.tokens} tokens of {seen.reqs} requests",
                    expected=f"({', '.join(map(name_of_axis, declared))})",
                    advice="name every dimension in its order, None for one of any size; return "
                    "a row for each token: torch.where(mask, x, fill) in place of x[mask]",
                )


def _failed(probe: Probe, size: tuple[int, int]) -> Exception | None:
    """The error that a forward raised at another size, or None. Errors about what it returned there
    are raised, and a lack of memory, which says nothing about the size."""
    try:
        probe(*size)
    except (OutputError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        return error
    return None


def _check_alike(seen: Seen, other: Seen) -> None:
    """Raise `OutputError` unless the forward returned as many tensors, of as many dimensions, and
    the same values at another size."""
    ranks = [{path: len(shape) for path, shape in each.shapes.items()} for each in (seen, other)]
    if ranks[0] != ranks[1]:
        raise OutputError(
            "the forward returns other outputs at another size",
            got=f"{_shown(seen.shapes)} with {seen.tokens} tokens of {seen.reqs} requests",
            expected=f"{_shown(other.shapes)} as with {other.tokens} of {other.reqs}",
            advice="return as many tensors, of as many dimensions, at every size: "
            "squeeze() without a dimension drops one at size 1",
        )
    for path, value in seen.values.items():
        if repr(value) != repr(other.values.get(path)):
            raise OutputError(
                "the forward returns a value, no tensor, that depends on the batch: a graph would "
                f"return that of its padded size{at_path(path)}",
                got=f"{told(value)} with {seen.tokens} tokens of {seen.reqs} requests",
                expected=f"{told(other.values.get(path))}, as with {other.tokens} of {other.reqs}",
                advice="do not return it: its caller can compute it of the batch",
            )


def _columns(path: str, seen: Sequence[Seen]) -> Iterable[tuple[int, ...]]:
    """The sizes of each dimension, over what was seen."""
    return zip(*(each.shapes[path] for each in seen), strict=True)


def _fits(column: Sequence[int], seen: Sequence[Seen]) -> list[Axis | None]:
    """What a dimension of these sizes can be, None being a constant."""
    constant: list[Axis | None] = [None] if len(set(column)) == 1 else []
    return constant + [
        axis for axis in _FOUND if [axis.size(each.tokens, each.reqs) for each in seen] == [*column]
    ]


def _dims_of(path: str, seen: Sequence[Seen], declared: Declared | None) -> BatchDims:
    """The dimensions of the output at `path` that are batch axes: as `outputs=` declares them,
    behind these by how they grew with the batch in the runs that were `seen`."""
    axes = declared or ()
    dims = [(dim, axis) for dim, axis in enumerate(axes) if isinstance(axis, Axis)]
    for dim, column in [*enumerate(_columns(path, seen))][len(axes) :]:
        fits = _fits(column, seen)
        if not fits:
            raise OutputError(
                f"a dimension of an output grows with the batch, but not as its tokens or "
                f"requests do{at_path(path)}",
                got=f"dimension {dim} is "
                + ", ".join(
                    f"{size} with {each.tokens} tokens of {each.reqs} requests"
                    for size, each in zip(column, seen, strict=True)
                ),
                expected="a dimension for tokens or for requests",
                advice='split it ([tokens * 2] as ["tokens", 2]), or return a row for every token '
                "and let the caller cut them, as x[:3] of the result",
            )
        if fits[0] is not None:
            dims.append((dim, fits[0]))
    return tuple(dims)


def _shown(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{path} {shape}".strip() for path, shape in shapes.items()) or "no tensors"


def _declared_axes(declared: Any) -> dict[str, Declared]:
    """The axes of `outputs=` by what they are of: a tensor, or all below that has no others.

    Raises `InvalidInputError` for an axis that there is not, `InvalidOptionError` for anything
    else.
    """
    by_prefix: dict[str, Declared] = {}

    def read(axes: Any, prefix: str) -> None:
        if axes is None:
            return
        if isinstance(axes, Mapping) and axes:
            for name, its_axes in axes.items():
                read(its_axes, f"{prefix}[{name!r}]")
        elif not isinstance(axes, tuple | list):
            raise _no_axes(prefix, axes)
        elif any(isinstance(axis, tuple | list | Mapping) for axis in axes):
            for place, its_axes in enumerate(axes):
                read(its_axes, f"{prefix}[{place}]")
        else:
            by_prefix[prefix] = tuple(map(_axis, axes))

    try:
        read(declared, "")
    except RecursionError:
        raise _no_axes("", declared) from None
    return by_prefix


def _is_of(prefix: str, path: str) -> bool:
    """Whether what is declared for `prefix` is of the tensor at `path`: a name may be a key, or a
    field."""
    named = prefix.replace("['", ".").replace("']", "")
    below = path.replace("['", ".").replace("']", "")
    return below.startswith(named) and below[len(named) : len(named) + 1] in ("", ".", "[")


def _axis(axis: Any) -> int | Axis | None:
    if axis is None:
        return None
    if isinstance(axis, str):
        return Axis.parse(axis)
    size = -1 if isinstance(axis, bool) or not hasattr(axis, "__index__") else index(axis)
    if size < 0:
        raise _no_axes("", axis)
    return size


def _no_axes(prefix: str, axes: object) -> InvalidOptionError:
    return InvalidOptionError(
        f"outputs= gives no axes{at_path(prefix)}",
        got=shown(axes),
        expected='"tokens", "rows", "reqs", "reqs+1", a size, or None for any size, in a tuple for '
        "every tensor",
        advice='outputs=("tokens", 4096), or outputs={"logits": ("tokens", vocab)}',
    )


def unknown_axes(path: str, got: str | None) -> OutputError:
    """The error for outputs that were not seen at two sizes."""
    return OutputError(
        f"it cannot be told which dimensions of the outputs are batch axes{at_path(path)}: no "
        "eager step of another size, to compare",
        got=got,
        expected="outputs= with the axes of every tensor that the forward returns",
        advice='outputs=("tokens", width), or {"logits": ("tokens", width)}',
    )


def check_tensor(path: str, tensor: torch.Tensor) -> None:
    """Raise `OutputError` for a tensor that cannot be handed out."""
    kind = type(tensor)
    got = kind.__qualname__
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        got = "nested" if tensor.is_nested else f"{tensor.layout}, {tensor.dtype}"
        what, advice = "that has no strided memory of its own", "return to_dense(), or its parts"
    elif kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        what = "subclass that holds other tensors"
        advice = "return the tensors in it, as to_local() does of a DTensor"
    elif kind not in (torch.Tensor, torch.nn.Parameter):
        # Of a weight that is one, say, torch makes results that are; pool memory is none.
        what = "subclass, and replays plain tensors"
        advice = "return result.as_subclass(torch.Tensor)"
    else:
        return
    raise OutputError(
        f"the forward returns a tensor {what}{at_path(path)}",
        got=got,
        expected="a plain, strided tensor at every step",
        advice=advice,
    )


def check_containers(outputs: Any) -> None:
    """Raise `OutputError` for a dict that has its tensors as attributes too, if they do not follow
    its items: the caller could find the graph's own there."""
    if isinstance(outputs, torch.Tensor):
        return
    if isinstance(outputs, dict):
        if type(outputs) is not dict and hasattr(outputs, "__dict__"):
            owned = {id(each) for each in vars(outputs).values() if isinstance(each, torch.Tensor)}
            copied = tree.map_leaves(torch.Tensor.detach, outputs) if owned else outputs
            if owned & {id(each) for each in vars(copied).values()}:
                raise OutputError(
                    "the forward returns a dict whose attributes are tensors, and stay what they "
                    "are where its items are replaced",
                    got=type(outputs).__qualname__,
                    expected="a dict, a dataclass, or a dict whose attributes follow its items",
                    advice="return dict(result)",
                )
        below: Iterable[Any] = outputs.values()
    else:
        below = outputs if isinstance(outputs, tuple | list) else ()
    for each in below:
        check_containers(each)


def name_of_axis(axis: int | Axis | None) -> str:
    """As `outputs=` writes it: `"tokens"`, the size of a fixed dimension, or None."""
    return f'"{axis}"' if isinstance(axis, Axis) else str(axis)


def at_path(path: str) -> str:
    """Where in the outputs, for a message."""
    return f", at {path}" if path else ""
