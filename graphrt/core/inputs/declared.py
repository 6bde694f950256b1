"""What a host declares of a forward's arguments, checked before anything is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from graphrt.core.base import InvalidInputError
from graphrt.core.inputs.spec import InputSpec

_RESERVED = {"metadata", "self", "updates"}
"""What a call of a runner, or of a wrapper, takes itself."""


def declared_inputs(specs: object) -> dict[str, InputSpec]:
    """The specs of `inputs=` by (dotted) name; raises `InvalidInputError`."""
    return dict(_specs(specs, "", "inputs="))


def _specs(specs: object, prefix: str, where: str) -> Iterator[tuple[str, InputSpec]]:
    if not isinstance(specs, Mapping):
        raise _wrong_inputs(where, specs, "a mapping of names to InputSpecs")
    if not specs:
        raise _wrong_inputs(where, specs, "at least one input")
    for name, spec in specs.items():
        if not isinstance(name, str) or not name or "." in name:
            raise _wrong_inputs(where, name, "names of arguments, without a dot")
        if not prefix and name in _RESERVED:
            raise _wrong_inputs(where, name, f"other names than {sorted(_RESERVED)}")
        if isinstance(spec, Mapping):
            yield from _specs(spec, f"{prefix}{name}.", f"inputs= at {prefix}{name}")
        elif isinstance(spec, InputSpec):
            yield prefix + name, spec
        else:
            raise _wrong_inputs(f"inputs= at {prefix}{name}", spec, "an InputSpec")


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as nested dicts again, which is how the forward gets them."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, leaf = name.split(".")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = value
    return nested


def flat_of(specs: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings as dotted names and what is there."""
    for name, spec in specs.items():
        if isinstance(spec, Mapping):
            yield from flat_of(spec, f"{prefix}{name}.")
        else:
            yield prefix + name, spec


def _wrong_inputs(where: str, value: object, expected: str) -> InvalidInputError:
    return InvalidInputError(
        f"{where} describes no inputs",
        got=repr(value)[:200],
        expected=expected,
        advice='inputs={"input_ids": InputSpec(torch.int64, ("tokens",))}; a mapping in it is an '
        "argument that is a dict",
    )
