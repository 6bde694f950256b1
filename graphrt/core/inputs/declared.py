"""What a host declares of a forward's arguments and results, checked before anything is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from graphrt.core.base import InvalidInputError, InvalidOptionError
from graphrt.core.batch import Axis
from graphrt.core.inputs.spec import InputSpec


def declared_inputs(specs: object) -> dict[str, InputSpec]:
    """The specs of `inputs=` by (dotted) name; raises `InvalidInputError`."""
    return dict(_specs(specs, "", "inputs="))


def checked_outputs(axes: Any) -> Any:
    """`outputs=` as it was given; raises `InvalidOptionError` for what are no axes, and
    `InvalidInputError` for an axis that there is not."""
    if axes is not None:
        _check_axes(axes, "outputs=")
    return axes


def _specs(specs: object, prefix: str, where: str) -> Iterator[tuple[str, InputSpec]]:
    if not isinstance(specs, Mapping):
        raise _wrong_inputs(where, specs, "a mapping of names to InputSpecs")
    if not specs:
        raise _wrong_inputs(where, specs, "at least one input")
    for name, spec in specs.items():
        if not isinstance(name, str) or not name or "." in name:
            raise _wrong_inputs(where, name, "names of arguments, without a dot")
        if isinstance(spec, Mapping):
            yield from _specs(spec, f"{prefix}{name}.", f"inputs= at {prefix}{name}")
        elif isinstance(spec, InputSpec):
            yield prefix + name, spec
        else:
            raise _wrong_inputs(f"inputs= at {prefix}{name}", spec, "an InputSpec")


def _wrong_inputs(where: str, value: object, expected: str) -> InvalidInputError:
    return InvalidInputError(
        f"{where} describes no inputs",
        got=repr(value)[:200],
        expected=expected,
        advice='inputs={"input_ids": InputSpec(torch.int64, ("tokens",))}; a mapping in it is an '
        "argument that is a dict",
    )


def _check_axes(axes: object, where: str) -> None:
    if isinstance(axes, Mapping):
        if not axes:
            raise _wrong_outputs(where, axes, "the axes of at least one output")
        for name, of_one in axes.items():
            if of_one is not None:
                _check_axes(of_one, f"{where} at {name!r}")
        return
    if not isinstance(axes, tuple | list):
        raise _wrong_outputs(where, axes, "a tuple of axes and sizes, or several by name or place")
    if any(isinstance(each, tuple | list | Mapping) for each in axes):
        for place, of_one in enumerate(axes):
            if of_one is not None:
                _check_axes(of_one, f"{where} at {place}")
        return
    for size in axes:
        if isinstance(size, str):
            Axis.parse(size)
        elif size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 0):
            raise _wrong_outputs(where, axes, "axes by name, and sizes >= 0")


def _wrong_outputs(where: str, value: object, expected: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"{where} gives no axes",
        got=repr(value)[:200],
        expected=expected,
        advice='outputs=("tokens", 4096), or outputs={"logits": ("tokens", vocab)}',
    )
