"""What an operator says of itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

LIFT_FRESH = torch.ops.aten.lift_fresh.default
"""The operator that returns every tensor made from Python data, or from a NumPy array."""


class OperatorFacts(NamedTuple):
    """What is known of one overload of an operator."""

    name: str = ""
    """Without the overload; "" for a higher-order operator, which has no schema."""
    writes: tuple[tuple[int, str], ...] = ()
    """The arguments that it writes, by position and name."""
    is_aten: bool = False
    is_view: bool = False
    """Whether it reads and writes no memory, as it makes a view or changes a shape."""
    makes_no_memory: bool = False
    draws: bool = False
    """Whether it says that it draws random numbers."""


@cache
def facts_of(func: Any) -> OperatorFacts:
    """The facts of an overload. A higher-order operator, which has no schema, has the defaults."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return OperatorFacts()
    writes, is_aten = writes_of(schema), schema.name.startswith("aten::")
    # For each result, whether it is an argument or a view of one.
    are_aliases = [result.alias_info is not None for result in schema.returns]
    return OperatorFacts(
        schema.name,
        writes,
        is_aten=is_aten,
        is_view=schema.name in _RESHAPING or (not writes and any(are_aliases)),
        makes_no_memory=is_aten and schema.name not in _MAKING and all(are_aliases),
        draws=torch.Tag.nondeterministic_seeded in func.tags,
    )


def writes_of(schema: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operator writes, by position and name."""
    return tuple(
        (at, argument.name)
        for at, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        # The schemas of batch norms do not say that these are written.
        or ("batch_norm" in schema.name and argument.name in ("running_mean", "running_var"))
    )


def written(facts: OperatorFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The tensors that a call writes."""
    for at, name in facts.writes:
        value = args[at] if at < len(args) else kwargs.get(name)
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (each for each in value if isinstance(each, torch.Tensor))


# They bring in memory that no operator made: a storage, or Python data.
_MAKING = {"aten::set_", "aten::lift_fresh"}

# They change a tensor's shape or storage, and write no memory.
_RESHAPING = {"aten::resize_", "aten::resize_as_", "aten::set_"}
