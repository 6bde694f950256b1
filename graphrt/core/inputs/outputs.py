"""Which dimensions of what a forward returns are batch axes: declared, or seen at two sizes."""

from __future__ import annotations

import enum
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from graphrt.core.base import (
    GraphRTError,
    OutputError,
    logger,
    told,
    tree,
)
from graphrt.core.batch import Axis
from graphrt.core.inputs._one_size import OneSize
from graphrt.core.inputs.output_axes import (
    Declared,
    DeclaredAxes,
    OutputAxes,
    at_path,
    check_containers,
    check_tensor,
    name_of_axis,
)

BatchDims = tuple[tuple[int, Axis | OneSize], ...]
"""The dimensions of one tensor that are cut to the live rows."""

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
        dataclass) to axes, or a tuple with the axes of each element. An axis is "tokens", "reqs",
        either with a constant added, a constant size, or None for any size.

        What is not declared is found by comparing shapes at two sizes. Raises `InvalidInputError`
        for an axis that there is not, `InvalidOptionError` for anything else.
        """
        self._axes = DeclaredAxes(declared)
        self._batch_dims: dict[str, BatchDims] = {}
        self._seen: list[Seen] = []
        self._resolved: set[tuple[int, int]] = set()
        self._fails_at: set[tuple[int, int]] = set()

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
        self._check_resolved(seen)
        if (tokens, reqs) not in self._resolved and seen not in self._seen:
            self._seen.append(seen)

    def forget(self) -> None:
        """Forget what was seen."""
        # First: whatever interrupts this, what is not there any more does not count as resolved.
        self._resolved = set()
        self._seen = []
        self._batch_dims = {}
        self._fails_at = set()

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

    def resolve(self, probe: Callable[[int, int], object] | None, *, query_len: int | None) -> None:
        """Find the batch axes of all tensors that were seen.

        Where one size was seen, or sizes that could be chance, `probe(tokens, reqs)` runs the
        forward at another one and lets this object see it; without it that is an error.
        `query_len` is the number of tokens of
        every request, where no graph is for other batches. Raises `OutputError` where it cannot be
        told.
        """
        if not self._seen or {(each.tokens, each.reqs) for each in self._seen} <= self._resolved:
            return
        failed: Exception | None = None
        for tokens, reqs in self._other_sizes(query_len):
            if probe is None or not self._unclear():
                break
            try:
                probe(tokens, reqs)
            except OutputError:
                raise
            except Exception as error:
                # Perhaps of this size alone.
                failed = error
        if failed is None and probe is not None:
            self._see_a_small_size(probe, query_len)
        if failed is not None and self._saw_one_size() and not self._unclear_values():
            seen = self._seen[0]
            self._batch_dims = {path: self._of_one_size(path, seen) for path in seen.shapes}
            self._resolved = {(seen.tokens, seen.reqs)}
            return
        if (failed is not None or probe is None) and self._unclear():
            raise OutputError(
                "it cannot be told which dimensions of the outputs are batch axes"
                f"{at_path(self._unclear()[0])}: no eager step of another size, to compare",
                got=None if failed is None else f"{type(failed).__name__}: {failed}",
                expected="outputs= with the axes of every tensor that the forward returns",
                advice='outputs=("tokens", width), or {"logits": ("tokens", width)}',
            ) from failed
        first = self._seen[0]
        self._batch_dims = {path: self._dims_of(path) for path in first.shapes}
        self._resolved = {(each.tokens, each.reqs) for each in self._seen}

    def _see_a_small_size(self, probe: Callable[[int, int], object], query_len: int | None) -> None:
        """Look at a size that shows what those seen do not, if there is one.

        Three rows at 4 and 8 tokens may be `x[:3]`, which has one row at one token; an axis that
        was seen at even sizes alone may be rounded up. A forward that does not run at that size
        has no steps of it either.
        """
        size = self._small_size(query_len)
        if size is None or size in self._fails_at:
            return
        try:
            probe(*size)
        except OutputError:
            raise
        except Exception as error:
            self._fails_at.add(size)
            logger.debug("the forward does not run at %d tokens of %d requests: %s", *size, error)

    def _small_size(self, query_len: int | None) -> tuple[int, int] | None:
        """Tokens and requests of a step at which a size would differ that looks constant, or
        like the tokens; None where all is told by what was seen."""
        least = min(seen.tokens for seen in self._seen)
        below: list[int] = []
        for path in self._seen[0].shapes:
            declared = self._axes.get(path) or ()
            for dim, column in enumerate(_columns(self._seen, path)):
                given = declared[dim] if dim < len(declared) else 0
                if len(set(column)) == 1 and 1 < column[0] <= least and isinstance(given, int):
                    below.append(column[0])
                elif not declared and all(size % 2 == 0 for size in column):
                    below.append(least)
        few = min(below, default=1) - 1
        if few < 1 or query_len is None:
            return None if few < 1 else (few, 1)
        reqs = max(few // query_len, 1)
        return None if reqs * query_len >= least else (reqs * query_len, reqs)

    def _unclear(self) -> list[str]:
        first = self._seen[0]
        unclear = [path for path in first.shapes if self._is_unclear(path)]
        return unclear + self._unclear_values()

    def _unclear_values(self) -> list[str]:
        """What is no tensor, and may be another at another size."""
        values = self._seen[0].values if self._saw_one_size() else {}
        return [path for path, value in values.items() if value is not None]

    def _of_one_size(self, path: str, seen: Seen) -> BatchDims:
        """The dimensions that may be batch axes of a forward that runs at one size alone: steps
        that fill it need no cut, and others are refused."""
        if self._axes.get(path) is not None:
            return self._dims_of(path)
        found: list[tuple[int, Axis | OneSize]] = []
        for dim, column in enumerate(_columns(self._seen, path)):
            # Other numbers of requests may have been seen.
            axis = self._axis_of(path, dim, column)
            if axis is not None:
                found.append((dim, axis))
            elif len(self._fits(column)) > 1:
                known = OneSize("tokens", 0, seen.tokens, seen.reqs, column[0], path)
                found.append((dim, known))
        return tuple(found)

    def _saw_one_size(self) -> bool:
        """Whether nothing is known of another size, and steps of another size are padded."""
        return {seen.tokens for seen in self._seen} == {self._seen[0].tokens} != {1}

    def _is_unclear(self, path: str) -> bool:
        declared = self._axes.get(path)
        if declared is None and self._saw_one_size():
            return True
        columns = list(_columns(self._seen, path))
        for dim, column in enumerate(columns):
            fits = self._fits(column)
            if len(fits) < 2:
                continue
            if declared is None or dim >= len(declared):
                if declared is None or not any(isinstance(axis, Axis) for axis in declared):
                    return True
                # Beside a declared axis: only a size that could be the same one, transposed.
                if any(columns[at] == column for at, axis in enumerate(declared) if axis in fits):
                    return True
            elif isinstance(declared[dim], Axis) and any(
                other == column for at, other in enumerate(columns) if at != dim
            ):
                return True
        return False

    def _dims_of(self, path: str) -> BatchDims:
        declared = self._axes.get(path)
        found: list[tuple[int, Axis]] = []
        for dim, column in enumerate(_columns(self._seen, path)):
            if declared is not None and dim < len(declared):
                axis = declared[dim]
                if isinstance(axis, Axis):
                    found.append((dim, axis))
                continue
            axis = self._axis_of(path, dim, column)
            if axis is not None:
                if declared is not None and any(isinstance(axis, Axis) for axis in declared):
                    raise _undeclared_axis(path, dim, axis)
                found.append((dim, axis))
        return tuple(found)

    def _axis_of(self, path: str, dim: int, column: Sequence[int]) -> Axis | None:
        """The batch axis that has these sizes, None being a constant."""
        fits = self._fits(column)
        if not fits:
            raise OutputError(
                f"a dimension of an output grows with the batch, but not as its tokens or "
                f"requests do{at_path(path)}",
                got=", ".join(
                    f"dimension {dim} is {size} with {seen.tokens} tokens of {seen.reqs} requests"
                    for size, seen in _that_differ(column, self._seen)
                ),
                expected="a dimension for tokens or for requests",
                advice='split it ([tokens * 2] as ["tokens", 2]), or return a row for every token '
                "and let the caller cut them, as x[:3] of the result",
            )
        return fits[0]

    def _fits(self, column: Sequence[int]) -> list[Axis | None]:
        """What a dimension of these sizes can be, None being a constant."""
        fits: list[Axis | None] = [None] if len(set(column)) == 1 else []
        for axis in _FOUND:
            if all(
                axis.size(seen.tokens, seen.reqs) == size
                for seen, size in zip(self._seen, column, strict=True)
            ):
                fits.append(axis)
        return fits

    def _other_sizes(self, query_len: int | None) -> Iterable[tuple[int, int]]:
        """Sizes of steps that tell tokens, requests and constants apart."""
        largest = max(self._seen, key=lambda seen: (seen.tokens, seen.reqs))
        tokens, reqs = largest.tokens, largest.reqs
        # Far from the largest first: of one token less, half as many rows may be as many.
        if query_len is not None:
            yield from ((few * query_len, few) for few in (reqs // 2, reqs - 1) if few > 0)
            return
        yield from ((few, 1) for few in (tokens // 2, tokens - 1) if few > 0)
        if reqs > 1:
            yield tokens, reqs - 1

    def _check_declared(self, seen: Seen, outputs: Any) -> None:
        for path in self._axes.missing(seen.shapes):
            keys = list(outputs) if isinstance(outputs, dict) else type(outputs).__name__
            raise OutputError(
                "the forward returns other outputs than outputs= names",
                got=keys,
                expected=f"an output {path}",
                advice="name the axes of what the forward returns",
            )
        for path, shape in seen.shapes.items():
            declared = self._axes.get(path)
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

    def _check_resolved(self, seen: Seen) -> None:
        """Raise unless what was seen has the axes that were found."""
        others = self._seen[:1]
        for other in others:
            if seen.shapes.keys() != other.shapes.keys() or any(
                len(shape) != len(other.shapes[path]) for path, shape in seen.shapes.items()
            ):
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
                        "the forward returns a value, no tensor, that depends on the batch: a graph"
                        f" would return that of its padded size{at_path(path)}",
                        got=f"{told(value)} with {seen.tokens} tokens of {seen.reqs} requests",
                        expected=f"{told(other.values.get(path))}, as with {other.tokens} of "
                        f"{other.reqs}",
                        advice="leave it out, and let the caller tell it from its batch",
                    )
            # One row is as long as a constant of 1: nothing was found by it alone.
            told_apart = {tokens for tokens, _ in self._resolved} != {1}
            for path, found in self._batch_dims.items() if told_apart else ():
                batch = dict(found)
                declared = self._axes.get(path) or ()
                for dim, size in enumerate(seen.shapes[path]):
                    axis = batch.get(dim)
                    if axis is None and dim < len(declared):
                        continue  # compared with its declaration
                    should = (
                        other.shapes[path][dim]
                        if axis is None
                        else axis.size(seen.tokens, seen.reqs)
                    )
                    if size != should:
                        raise OutputError(
                            f"an output has another shape than at other sizes{at_path(path)}",
                            got=f"{size} in dimension {dim} with {seen.tokens} tokens of "
                            f"{seen.reqs} requests",
                            expected=f"{should}, as it was found to be "
                            f"{'constant' if axis is None else axis}",
                            advice="declare the axes of what the forward returns: outputs=",
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


def _that_differ(column: Sequence[int], seen: Sequence[Seen]) -> list[tuple[int, Seen]]:
    """The first size with its batch, and another one: of another size if there is one."""
    both = list(zip(column, seen, strict=True))
    other = next((each for each in both if each[0] != column[0]), both[-1])
    return [both[0], other]


def _columns(seen: Sequence[Seen], path: str) -> Iterable[tuple[int, ...]]:
    """The sizes of each dimension, over what was seen."""
    return zip(*(each.shapes[path] for each in seen), strict=True)


def _undeclared_axis(path: str, dim: int, axis: Axis) -> GraphRTError:
    return OutputError(
        f"an output has a batch axis that outputs= leaves out{at_path(path)}",
        got=f"dimension {dim} is as long as the {axis}",
        expected="every batch axis declared",
        advice="name every dimension in its order; None is one of any size",
    )


def _shown(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{path} {shape}".strip() for path, shape in shapes.items()) or "no tensors"
