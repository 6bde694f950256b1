"""The axes that a host declares for what its forward returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import index
from typing import Any, NamedTuple

import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import InvalidOptionError, OutputError
from graphrt.core.base.option_values import shown
from graphrt.core.batch.axes import Axis

OutputAxes = tuple[Any, ...] | Mapping[str, Any] | None
"""Axes of an output, or of several by name or position: see `OutputLayout`."""

Declared = tuple[int | Axis | None, ...]
"""The axes of one tensor: a constant size, a batch axis, or None for a size that is not looked at.
Dimensions behind the last one are constants, or are found where no batch axis is declared."""


class OneSize(NamedTuple):
    """What may be a batch axis of the output at `path`: nothing but its size in one batch is known,
    as the forward runs at no other size."""

    tokens: int
    reqs: int
    known: int
    path: str

    def size(self, tokens: int, reqs: int) -> int:
        """The size in a batch of so many tokens and requests; raises `OutputError` for another one
        than was seen."""
        if (tokens, reqs) != (self.tokens, self.reqs):
            why = f"the forward runs at no other size than {self.tokens} tokens"
            step = f"a step of {tokens} tokens of {reqs} requests"
            raise unknown_axes(self.path, why, step)
        return self.known


class DeclaredAxes:
    """The declared axes of every tensor that a forward returns, whatever contains it."""

    def __init__(self, declared: Any) -> None:
        """Raises `InvalidInputError` for an axis that there is not, `InvalidOptionError` for
        anything else."""
        self._by_prefix: dict[str, Declared] = {}
        try:
            self._read(declared, "")
        except RecursionError:
            raise _no_axes("", declared) from None
        self._forms = {prefix: _forms(prefix) for prefix in self._by_prefix}
        self._found: dict[str, Declared | None] = {}

    def get(self, path: str) -> Declared | None:
        """The axes of the tensor at `path`, None if there are none."""
        if path not in self._found:
            of_path = (
                axes for prefix, axes in self._by_prefix.items() if self._covers(prefix, path)
            )
            self._found[path] = next(of_path, None)
        return self._found[path]

    def missing(self, shapes: Iterable[str]) -> list[str]:
        """What is declared but not among these paths."""
        paths = list(shapes)
        return [
            prefix
            for prefix in self._by_prefix
            if not any(self._covers(prefix, path) for path in paths)
        ]

    def _covers(self, prefix: str, path: str) -> bool:
        return any(
            path == form or (path.startswith(form) and path[len(form)] in ".[")
            for form in self._forms[prefix]
        )

    def _read(self, axes: Any, prefix: str) -> None:
        if axes is None:
            return
        if isinstance(axes, Mapping):
            if not axes:
                raise _no_axes(prefix, axes)
            for name, its_axes in axes.items():
                self._read(its_axes, f"{prefix}[{name!r}]")
        elif not isinstance(axes, tuple | list):
            raise _no_axes(prefix, axes)
        elif any(isinstance(axis, tuple | list | Mapping) for axis in axes):
            for place, its_axes in enumerate(axes):
                self._read(its_axes, f"{prefix}[{place}]")
        else:
            self._by_prefix[prefix] = tuple(_axis(axis) for axis in axes)


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
        expected='"tokens", "reqs", "reqs+1", a size, or None for any size, in a tuple for every '
        "tensor",
        advice='outputs=("tokens", 4096), or outputs={"logits": ("tokens", vocab)}',
    )


def unknown_axes(path: str, why: str, got: str | None) -> OutputError:
    """The error for outputs that were not seen at two sizes."""
    return OutputError(
        f"it cannot be told which dimensions of the outputs are batch axes{at_path(path)}: {why}, "
        "to compare",
        got=got,
        expected="outputs= with the axes of every tensor that the forward returns",
        advice='outputs=("tokens", width), or {"logits": ("tokens", width)}',
    )


def _forms(prefix: str) -> tuple[str, ...]:
    """A declared name as a key, and as a field."""
    fields = prefix.replace("['", ".").replace("']", "")
    return (prefix,) if fields == prefix else (prefix, fields)


def check_tensor(path: str, tensor: torch.Tensor) -> None:
    """Raise `OutputError` for a tensor that cannot be handed out."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else f"{tensor.layout}, {tensor.dtype}"
        raise OutputError(
            f"the forward returns a tensor that has no strided memory of its own{at_path(path)}",
            got=kind,
            expected="a strided tensor",
            advice="return to_dense(), or the parts of it",
        )
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise OutputError(
            f"the forward returns a tensor subclass that holds other tensors{at_path(path)}",
            got=type(tensor).__qualname__,
            expected="a plain tensor",
            advice="return the tensors in it, as to_local() does of a DTensor",
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        # Of a weight that is one, say, torch makes results that are; pool memory is none.
        raise OutputError(
            f"the forward returns a tensor subclass, and replays plain tensors{at_path(path)}",
            got=type(tensor).__qualname__,
            expected="a plain tensor at every step",
            advice="return result.as_subclass(torch.Tensor)",
        )


def check_containers(outputs: Any) -> None:
    """Raise `OutputError` for a dict that has its tensors as attributes too, if they do not follow
    its items: the caller could find the graph's own there."""
    if isinstance(outputs, torch.Tensor):
        return
    if isinstance(outputs, dict):
        if type(outputs) is not dict and hasattr(outputs, "__dict__"):
            own = {id(each) for each in vars(outputs).values() if isinstance(each, torch.Tensor)}
            copied = tree.map_tensors(torch.Tensor.detach, outputs) if own else outputs
            if own & {id(each) for each in vars(copied).values()}:
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
