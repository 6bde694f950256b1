"""Host arguments of tasks: what a step may say of them, and how they are padded to its graph."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from operator import index
from typing import Any, Final, Literal

from graphrt.core.base import InvalidUpdateError
from graphrt.core.batch import Axis

HostValues = Mapping[str, Any]
"""The host arguments of one task by name."""


Updates = Mapping[str, HostValues]
"""The host values of a step by the name of their task or its group."""


class _Marker:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


UNCHANGED: Final = _Marker("UNCHANGED")
"""As `updates=`: every task keeps the host arguments of the step before; to a wrapper by itself, of
the replay before of the same graph."""


WORST_CASE: Final = _Marker("WORST_CASE")
"""As `updates=`: every task takes its `at_capture` arguments, for warm-up and capture."""


@dataclass(frozen=True)
class HostArg:
    """One host argument of a task.

    `axis` None is a scalar. A list over "reqs" or "tokens" is padded to the graph's size: with
    `pad` "zero", with "repeat" of its last value, or as "cumulative" query lengths, whose padding
    ends at the graph's number of tokens. "reqs+1" has room for one request more, to which padding
    tokens can belong when all requests are live. An `optional` one may be left out of updates.

    Raises `InvalidInputError` for an axis that does not exist.
    """

    axis: str | None = "reqs"
    pad: Literal["zero", "repeat", "cumulative"] = "zero"
    optional: bool = False
    _axis: Axis | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # The only way to set a field of a frozen dataclass.
        object.__setattr__(self, "_axis", None if self.axis is None else Axis.parse(self.axis))

    def fitted(self, key: str, value: Any, tokens: int, reqs: int | None) -> Any:
        """`value` padded for a graph of `tokens` and `reqs`; raises `InvalidUpdateError`."""
        axis = self._axis
        if axis is None:
            # A copy, so that a list that the host changes in place is seen as changed.
            return value if type(value) is int else copy.copy(value)
        try:
            values = list(map(index, value))
        except TypeError as error:
            raise InvalidUpdateError(
                f"host argument {key!r} is no list of whole numbers",
                got=repr(value)[:200],
                expected=f"one whole number for each of the {axis.name}",
                advice="pass a list of ints",
            ) from error
        if self.pad == "cumulative":
            _check_rising(key, values, tokens)
        size = None if reqs is None and axis.name == "reqs" else axis.size(tokens, reqs or 0)
        missing = 0 if size is None else size - len(values)
        if not values or missing < 0:
            raise InvalidUpdateError(
                f"host argument {key!r} has the wrong length",
                got=len(values),
                expected=f"1 to {size} ({self.axis} of the graph)",
                advice="pass one value for each live request",
            )
        if self.pad == "zero":
            return values + [0] * missing
        if self.pad == "repeat":
            return values + [values[-1]] * missing
        if not missing and values[-1] != tokens:
            raise InvalidUpdateError(
                f"cumulative host argument {key!r} does not add up",
                got=values,
                expected=f"the last one to be {tokens}, as the padding tokens need a request too",
                advice='declare it with axis "reqs+1", or pad the batch to its own tokens',
            )
        return values + [values[-1]] * (missing - 1) + [tokens] * (missing > 0)


def _check_rising(key: str, values: list[int], tokens: int) -> None:
    rising = all(a <= b for a, b in pairwise(values))
    if not values or not rising or values[0] < 0 or values[-1] > tokens:
        raise InvalidUpdateError(
            f"cumulative host argument {key!r} does not add up",
            got=values,
            expected=f"rising values of at most {tokens} tokens",
            advice="pass the running sum of the query lengths",
        )
