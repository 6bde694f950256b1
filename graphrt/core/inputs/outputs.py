"""Which dimensions of what a forward returns are batch axes: declared, or seen at several sizes.

A dimension has one possible axis where `outputs=` gives it, else three at first: a constant size,
tokens and requests.

1. `see` removes those that do not hold at one more size, and raises where none is left.
2. `resolve` runs eager steps of other sizes until each dimension has one axis.
"""

from __future__ import annotations

import enum
import numbers
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from operator import index
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import GraphRTError, OutputError
from graphrt.core.base.option_values import refused
from graphrt.core.batch.descriptor import Axis

OutputAxes = tuple[Any, ...] | Mapping[str, Any] | None
"""Axes of an output, or of several by name or position: see `OutputLayout`."""

OneAxis = int | Axis | None
"""What a dimension is: of a constant size, a batch axis, or None, of any size."""

BatchDims = tuple[tuple[int, Axis], ...]
"""The dimensions of one tensor that are cut to the live rows."""

Probe = Callable[[int, int], object]
"""Runs the forward at a size (tokens, requests), and lets the layout see what it returns."""

_BATCH = (Axis("tokens"), Axis("reqs"))
_VALUES = (numbers.Number, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size)


class OutputLayout:
    """The batch axes of every tensor that a forward returns, by its path (`['logits']`, `[0]`)."""

    def __init__(self, declared: OutputAxes = None) -> None:
        """`declared` are the axes of a tensor, or a mapping of names (keys, or fields of a
        dataclass) to axes, or a tuple with the axes of each element. An axis is "tokens" (or
        "rows"), "reqs", either with a constant added, a constant size, or None for any size.
        Dimensions behind the declared ones are found.

        Raises `InvalidInputError` for an axis that there is not, `InvalidOptionError` for anything
        else.
        """
        self._declared = _declared_axes(declared)
        self.forget()

    def forget(self) -> None:
        """Forget what was seen."""
        # The sizes (tokens, requests) that `resolve` has taken into account, and all that were
        # seen. The former goes first: interrupted then, no forgotten size counts as resolved.
        self._resolved: set[tuple[int, int]] = set()
        self._seen: set[tuple[int, int]] = set()
        # path -> how many dimensions a tensor has, or the text of another value.
        self._structure: dict[str, int | str] = {}
        # path -> for each dimension of a tensor, the axes that it may have.
        self._axes: dict[str, list[list[OneAxis]]] = {}
        # path -> the answer of `batch_dims`, as of the last `resolve`.
        self._batch_dims: dict[str, BatchDims] = {}

    def see(self, tokens: int, reqs: int, outputs: Any) -> None:
        """Note what a forward returned in a batch of this size; raises `OutputError` for what
        cannot be handed out, or is another structure, value or shape than graphs may pad."""
        leaves = tree.leaves(outputs)  # first: it raises for outputs that hold themselves
        check_containers(outputs)
        structure: dict[str, int | str] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for path, leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                check_tensor(path, leaf)
                structure[path], shapes[path] = leaf.dim(), tuple(leaf.shape)
            elif leaf is None or isinstance(leaf, _VALUES):
                structure[path] = repr(leaf)
            else:
                raise OutputError(
                    f"the forward returns an object that graphrt cannot look into{at_path(path)}",
                    got=type(leaf).__qualname__,
                    expected="tensors, numbers and strings in tuples, lists, dicts and dataclasses",
                    advice="return the tensors in it, or leave it out: result.logits alone, or "
                    "use_cache=False, of a model of transformers",
                )
        size = f"{tokens} tokens of {reqs} requests"
        if not self._seen:
            self._check_names(shapes, outputs)
        elif structure != self._structure:
            raise _other_structure(structure, self._structure, size)
        possible = self._axes or {
            path: self._axes_at_first(path, shape) for path, shape in shapes.items()
        }
        self._structure = structure
        # Before the check: a dimension without any axis stays one, for which `resolve` raises.
        self._axes = {
            path: [
                [axis for axis in axes if rows is not None and _fits(axis, rows, tokens, reqs)]
                for axes, rows in zip_longest(possible[path], shape)
            ]
            for path, shape in shapes.items()
        }
        self._seen.add((tokens, reqs))
        self._check_axes(possible, shapes, size)

    def _check_axes(
        self,
        possible: dict[str, list[list[OneAxis]]],
        shapes: dict[str, tuple[int, ...]],
        size: str,
    ) -> None:
        """Raise `OutputError` for a dimension that has none of its `possible` axes any more."""
        for path, axes in self._axes.items():
            if not all(axes):
                names = (" or ".join(map(str, each)) for each in possible[path])
                declared = self._declared_for(path)
                whose = "it had at other sizes" if declared is None else "outputs= gives it"
                raise OutputError(
                    f"an output does not have the axes that {whose}{at_path(path)}",
                    got=f"shape {shapes[path]} with {size}",
                    expected=f"({', '.join(names)})",
                    advice="name every dimension in its order, None for one of any size. Where one "
                    'grows in another way, split it ([tokens * 2] as ["tokens", 2]), or return a '
                    "row for every token (torch.where(mask, x, fill) in place of x[mask]) and let "
                    "the caller cut them, as x[:3] of the result",
                )

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
        if self._seen <= self._resolved:
            return
        failed = None if probe is None else self._run_other_sizes(probe, query_len)
        unclear = self._unclear() if failed or probe is None else []
        unclear += [path for path, axes in self._axes.items() if not all(axes)]
        if unclear:
            raise OutputError(
                "the sizes that were run do not tell which dimensions of the outputs are batch axes"
                f"{at_path(unclear[0])}",
                got=None if failed is None else f"{type(failed).__name__}: {failed}",
                expected="outputs= with the axes of every tensor that the forward returns",
                advice='outputs=("tokens", width), or {"logits": ("tokens", width)}',
            ) from failed
        self._batch_dims = {
            path: tuple((dim, axis) for dim, (axis, *_) in enumerate(axes) if type(axis) is Axis)
            for path, axes in self._axes.items()
        }
        self._resolved = set(self._seen)

    def _run_other_sizes(self, probe: Probe, query_len: int | None) -> Exception | None:
        """Run the forward at other sizes until all axes are clear; returns what it raised where it
        did not run.

        One request of one token comes first, even where all seems told: three rows at 4 and 8
        tokens may be `x[:3]`, and what was seen at even sizes alone may be rounded up. A forward
        that does not run at that size has no steps of it either.
        """
        failed: Exception | None = None
        wanted = self._may_differ_in_small_batches() or self._unclear()
        for size in self._other_sizes(query_len) if wanted else ():
            if wanted and size not in self._seen:
                try:
                    probe(*size)
                except (OutputError, MemoryError, torch.OutOfMemoryError):
                    # The outputs are wrong; or memory is lacking, which says nothing of axes.
                    raise
                except Exception as error:
                    failed = error
            wanted = self._unclear()
        return failed

    def _other_sizes(self, query_len: int | None) -> list[tuple[int, int]]:
        """Sizes of steps that tell tokens, requests and constants apart, the smallest first."""
        tokens, reqs = max(self._seen)
        # Sizes next to the largest come last, as they tell less: 9 // 2 is 8 // 2.
        if query_len is not None:
            return [(few * query_len, few) for few in (1, reqs // 2, reqs - 1) if few > 0]
        sizes = [(few, 1) for few in (1, tokens // 2, tokens - 1) if few > 0]
        return [*sizes, (tokens, reqs - 1)] if reqs > 1 else sizes

    def _may_differ_in_small_batches(self) -> bool:
        """Whether a small batch may have other axes than those seen: where not all is declared, or
        a constant size is no larger than the batches seen."""
        least = min(tokens for tokens, _ in self._seen)
        return any(
            len(self._declared_for(path) or ()) < len(dims)
            or None in (self._declared_for(path) or ())
            or any(type(axis) is int and 1 < axis <= least for axes in dims for axis in axes)
            for path, dims in self._axes.items()
        )

    def _unclear(self) -> list[str]:
        """The paths of outputs that may be otherwise at another size: several axes are possible, or
        they are not declared and were seen at one size alone."""
        counts = {tokens for tokens, _ in self._seen}
        one_size = len(counts) == 1 and counts != {1}
        # `outputs=` declares tensors only: any other value but None is open too.
        open_ones = [
            path
            for path, kind in self._structure.items()
            if one_size
            and kind != "None"
            and (path not in self._axes or self._declared_for(path) is None)
        ]
        several = [p for p, dims in self._axes.items() if any(len(axes) > 1 for axes in dims)]
        return [*several, *open_ones]

    def _declared_for(self, path: str) -> tuple[OneAxis, ...] | None:
        """The axes that `outputs=` gives the tensor at `path`, None if it gives none."""
        return next((axes for at, axes in self._declared.items() if _is_of(at, path)), None)

    def _axes_at_first(self, path: str, shape: tuple[int, ...]) -> list[list[OneAxis]]:
        """The axes that each dimension may have before sizes are compared."""
        declared: list[list[OneAxis]] = [[axis] for axis in self._declared_for(path) or ()]
        return declared + [[rows, *_BATCH] for rows in shape[len(declared) :]]

    def _check_names(self, paths: Iterable[str], outputs: Any) -> None:
        """Raise `OutputError` for what `outputs=` names and the forward does not return."""
        for prefix in self._declared:
            if not any(_is_of(prefix, path) for path in paths):
                raise OutputError(
                    "the forward returns other outputs than outputs= names",
                    got=list(outputs) if isinstance(outputs, dict) else type(outputs).__name__,
                    expected=f"an output {prefix}",
                    advice="name the axes of what the forward returns",
                )


def _fits(axis: OneAxis, rows: int, tokens: int, reqs: int) -> bool:
    """Whether a dimension of so many rows can be of that axis, in a batch of that size."""
    size = axis.size(tokens, reqs) if isinstance(axis, Axis) else axis
    return size is None or size == rows


def _other_structure(
    structure: Mapping[str, object], expected: Mapping[str, object], size: str
) -> OutputError:
    """The error for outputs that have another structure at this size than `expected`."""
    paths = [
        path for path in {**structure, **expected} if structure.get(path) != expected.get(path)
    ]
    return OutputError(
        "the forward returns other outputs at another size: graphs need as many tensors, of as "
        "many dimensions, and equal Python values",
        got=f"others with {size}" + at_path(", ".join(paths)),
        expected="the same structure at every size",
        advice="squeeze() without a dimension drops one at size 1; do not return a number that its "
        "caller can compute of the batch",
    )


def _declared_axes(declared: Any) -> dict[str, tuple[OneAxis, ...]]:
    """path of a tensor, or of a container of tensors -> the axes that `outputs=` gives it.

    Raises `InvalidInputError` for an axis that there is not, `InvalidOptionError` for anything
    else.
    """
    by_prefix: dict[str, tuple[OneAxis, ...]] = {}

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
    """Whether what is declared for `prefix` holds for the tensor at `path`: a name may be a key, or
    a field."""
    named = prefix.replace("['", ".").replace("']", "")
    below = path.replace("['", ".").replace("']", "")
    return below.startswith(named) and below[len(named) : len(named) + 1] in ("", ".", "[")


def _axis(axis: Any) -> OneAxis:
    """One axis of `outputs=`, in its own type; raises `InvalidOptionError` for what is none."""
    if axis is None:
        return None
    if isinstance(axis, str):
        return Axis.parse(axis)
    size = -1 if isinstance(axis, bool) or not hasattr(axis, "__index__") else index(axis)
    if size < 0:
        raise _no_axes("", axis)
    return size


def _no_axes(prefix: str, axes: object) -> GraphRTError:
    each = '"tokens", "rows", "reqs", "reqs+1", a size, or None for any size'
    advice = 'outputs=("tokens", 4096), or outputs={"logits": ("tokens", vocab)}'
    what, expected = (
        f"outputs= gives no axes{at_path(prefix)}",
        f"{each}, in a tuple for every tensor",
    )
    return refused(what, axes, expected, advice)


def check_tensor(path: str, tensor: torch.Tensor) -> None:
    """Raise `OutputError` for a tensor that cannot be handed out."""
    kind = type(tensor)
    got = kind.__qualname__
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        got = "nested" if tensor.is_nested else f"{tensor.layout}, {tensor.dtype}"
        what = "that has no strided memory of its own"
        advice = (
            "return to_dense() of it, from an @eager_break if the device cannot capture the "
            "operator"
        )
    elif tensor.device.type == "meta":
        got, what = "device meta", "that has no values"
        advice = "leave it out, or return its shape"
    elif kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        what = "subclass that holds other tensors"
        advice = "return the tensors in it, as to_local() does of a DTensor"
    elif kind not in (torch.Tensor, torch.nn.Parameter):
        # A subclass, as torch returns for a weight of one; what replays hand out is plain.
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
    below: Iterable[Any] = outputs if isinstance(outputs, tuple | list) else ()
    if isinstance(outputs, dict):
        below = outputs.values()
        owned = _attributes(outputs)
        if owned and owned & _attributes(tree.map_leaves(torch.Tensor.detach, outputs)):
            raise OutputError(
                "the forward returns a dict with tensors in its attributes, which replays do not "
                "replace",
                got=type(outputs).__qualname__,
                expected="a dict, a dataclass, or a dict whose attributes follow its items",
                advice="return dict(result)",
            )
    for each in below:
        check_containers(each)


def _attributes(owner: Any) -> set[int]:
    """The ids of the tensors that an object has as attributes."""
    attributes = getattr(owner, "__dict__", {}).values()
    return {id(each) for each in attributes if isinstance(each, torch.Tensor)}


def at_path(path: str) -> str:
    """Where in the outputs, for a message."""
    return f", at {path}" if path else ""
