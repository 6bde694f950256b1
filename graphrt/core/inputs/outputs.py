"""Which dimensions of what a forward returns are batch axes: declared, or seen at two sizes."""

from __future__ import annotations

import enum
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from typing import Any, NamedTuple

import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import InvalidOptionError, OutputError
from graphrt.core.base.log import logger
from graphrt.core.base.option_values import shown, told
from graphrt.core.batch.axes import Axis

OutputAxes = tuple[Any, ...] | Mapping[str, Any] | None
"""Axes of an output, or of several by name or position: see `OutputLayout`."""

Declared = tuple[int | Axis | None, ...]
"""The axes of one tensor: a constant size, a batch axis, or None for a size that is not looked at.
Dimensions behind the last one are constants, or are found where no batch axis is declared."""


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
        self._batch_dims: dict[str, BatchDims] = {}
        self._seen: list[Seen] = []
        self._resolved: set[tuple[int, int]] = set()

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
        self._resolved = set()
        self._seen = []
        self._batch_dims = {}

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

        `probe(tokens, reqs)` runs the forward at another size and lets this object see it. It is
        called until what was seen tells all axes apart; without it that is an error. `query_len` is
        the number of tokens of every request, where no graph is for other batches. Raises
        `OutputError` where axes cannot be told: they must be declared then.
        """
        if not self._seen or {(each.tokens, each.reqs) for each in self._seen} <= self._resolved:
            return
        failed = None if probe is None else self._compare(probe, query_len)
        unclear = self._ambiguous() if failed or probe is None else []
        if probe is None and self._saw_one_size():
            unclear += [path for path in self._seen[0].shapes if self._axes(path) is None]
        if unclear:
            raise OutputError(
                "it cannot be told which dimensions of the outputs are batch axes: there is no "
                f"eager step of another size to compare{at_path(unclear[0])}",
                got=None if failed is None else f"{type(failed).__name__}: {failed}",
                expected="outputs= with the axes of every tensor that the forward returns",
                advice='outputs=("tokens", width), or {"logits": ("tokens", width)}',
            ) from failed
        self._batch_dims = {
            path: _dims_of(path, self._seen, self._axes(path)) for path in self._seen[0].shapes
        }
        self._resolved = {(each.tokens, each.reqs) for each in self._seen}

    def _compare(self, probe: Probe, query_len: int | None) -> Exception | None:
        """Look at other sizes until what was seen tells all; returns what the forward raised where
        it did not run.

        At the smallest one first, unless constants are declared: three rows at 4 and 8 tokens may
        be `x[:3]`, which has one row at one token, and 4 and 8 rows may be rounded up. A forward
        that does not run there has no steps of that size either.
        """
        failed: Exception | None = None
        smallest, *others = self._other_sizes(query_len)
        if any(map(self._may_bend, self._seen[0].shapes)):
            self._look(probe, smallest)
        for size in others:
            undeclared = any(self._axes(path) is None for path in self._seen[0].shapes)
            if not (undeclared and self._saw_one_size()) and not self._ambiguous():
                break
            # Perhaps of this size alone.
            failed = self._look(probe, size) or failed
        return failed

    def _look(self, probe: Probe, size: tuple[int, int]) -> Exception | None:
        """Let the forward run at a size; returns its error. Errors about what it returned there are
        raised, and a lack of memory, which says nothing about the size."""
        if size in [each[:2] for each in self._seen]:
            return None
        try:
            probe(*size)
        except (OutputError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            logger.debug("the forward does not run at %d tokens of %d: %s", *size, error)
            return error
        return None

    def _other_sizes(self, query_len: int | None) -> list[tuple[int, int]]:
        """The smallest size of a step, and sizes that tell tokens, requests and constants apart."""
        tokens, reqs, *_ = max(self._seen, key=lambda seen: seen[:2])
        # Far from the largest first: of one token less, half as many rows may be as many.
        if query_len is not None:
            return [(n * query_len, n) for n in (1, reqs // 2, reqs - 1) if n > 0]
        sizes = [(n, 1) for n in (1, tokens // 2, tokens - 1) if n > 0]
        return [*sizes, (tokens, reqs - 1)] if reqs > 1 else sizes

    def _may_bend(self, path: str) -> bool:
        """Whether a dimension that nobody declares, or declares as few rows, may have another size
        in a small batch."""
        declared, least = self._axes(path) or (), min(seen.tokens for seen in self._seen)
        return any(
            dim >= len(declared) or (isinstance(declared[dim], int) and 1 < size <= least)
            for dim, size in enumerate(self._seen[0].shapes[path])
        )

    def _saw_one_size(self) -> bool:
        """Whether nothing is known of another size, and steps of another size are padded."""
        return {seen.tokens for seen in self._seen} == {self._seen[0].tokens} != {1}

    def _ambiguous(self) -> list[str]:
        """The tensors of which a dimension has sizes that fit more than one axis, and no
        declaration tells; and, where one size was seen, what is no tensor."""
        paths = [path for path in self._seen[0].shapes if self._is_ambiguous(path)]
        values = self._seen[0].values if self._saw_one_size() else {}
        return paths + [path for path, value in values.items() if value is not None]

    def _is_ambiguous(self, path: str) -> bool:
        declared = self._axes(path) or ()
        columns = list(_columns(path, self._seen))
        named = [at for at, axis in enumerate(declared) if isinstance(axis, Axis)]
        for dim, column in enumerate(columns):
            if len(_fits(column, self._seen)) < 2:
                continue
            # Beside a declared axis: only a size that could be the same one, transposed.
            if dim in named and columns.count(column) > 1:
                return True
            beside = not named or column in [columns[at] for at in named]
            if dim >= len(declared) and beside:
                return True
        return False

    def _axes(self, path: str) -> Declared | None:
        """The declared axes of the tensor at `path`, None if there are none."""
        return next((axes for prefix, axes in self._declared.items() if _is_of(prefix, path)), None)

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
                    advice=_declared_right(declared, shape, sizes),
                )


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


def _declared_right(declared: Declared, shape: tuple[int, ...], sizes: Sequence[int | None]) -> str:
    """What to do about an output of another shape than its declaration says."""
    if len(declared) == len(shape):
        for axis, actual, size in zip(declared, shape, sizes, strict=True):
            if isinstance(axis, Axis) and size is not None and actual != size:
                # Padding rows are zeros as a rule, of which a mask takes all or none.
                return (
                    "return a row for each of them: torch.where(mask, x, fill) keeps the rows that "
                    f"x[mask] drops; or None in place of {name_of_axis(axis)} where it has the "
                    "same size in every batch"
                )
            if isinstance(axis, int) and actual != axis:
                return (
                    f"{actual} in place of {axis} where it always is, or the axis that it grows "
                    "with; where it bends, return all rows and let the caller cut them"
                )
    return "name every dimension in its order; None is one of any size"


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
    """The batch axes of a tensor, by what was seen of it."""
    axes = declared or ()
    dims = [(dim, axis) for dim, axis in enumerate(axes) if isinstance(axis, Axis)]
    named = bool(dims)
    for dim, column in [*enumerate(_columns(path, seen))][len(axes) :]:
        fits = _fits(column, seen)
        if not fits:
            # The first size, and one that differs if there is one.
            places = [0, next((n for n, size in enumerate(column) if size != column[0]), -1)]
            raise OutputError(
                f"a dimension of an output grows with the batch, but not as its tokens or "
                f"requests do{at_path(path)}",
                got=", ".join(
                    f"dimension {dim} is {column[n]} with {seen[n].tokens} tokens of "
                    f"{seen[n].reqs} requests"
                    for n in places
                ),
                expected="a dimension for tokens or for requests",
                advice='split it ([tokens * 2] as ["tokens", 2]), or return a row for every token '
                "and let the caller cut them, as x[:3] of the result",
            )
        if fits[0] is not None and named:
            raise OutputError(
                f"an output has a batch axis that outputs= leaves out{at_path(path)}",
                got=f"dimension {dim} is as long as the {fits[0]}",
                expected="every batch axis declared",
                advice="name every dimension in its order; None is one of any size",
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
            copied = tree.map_tensors(torch.Tensor.detach, outputs) if owned else outputs
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
    """As in `outputs=`."""
    return f'"{axis}"' if isinstance(axis, Axis) else str(axis)


def at_path(path: str) -> str:
    """Where in the outputs, for a message."""
    return f", at {path}" if path else ""
