"""Host arguments of tasks: what a step may say of them, and how they are padded to its graph."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from operator import index
from typing import Any, Final, Literal

import torch

from graphrt.core.base.errors import InvalidUpdateError
from graphrt.core.base.homes import public
from graphrt.core.base.option_values import check_kind, choice, flag, shown
from graphrt.core.batch.axes import Axis
from graphrt.core.batch.descriptor import Batch

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


DEFERRED: Final = _Marker("DEFERRED")
"""As `updates=` to a wrapper whose device can wait for them (Ascend's): they come after the call,
with its `update`. Until then nothing else may run in its pool."""


@public("graphrt")
@dataclass(frozen=True)
class HostArg:
    """One host argument of a task.

    `axis` None is a scalar. A list over "reqs" or "tokens" is padded to the graph's size: with
    `pad` "zero", with "repeat" of its last value, with "query_len" (the tokens of each request of a
    uniform graph, else zero), or as "cumulative" query lengths, whose padding ends at the graph's
    number of tokens: in a uniform graph each padding request has its query length, in others the
    last one has all. "reqs+1" has room for one request more, to which padding
    tokens can belong when all requests are live. An `optional` one may be left out of updates.
    `least` and `most` bound every value of a list.

    Raises `InvalidInputError` for an axis that does not exist.
    """

    axis: str | None = "reqs"
    pad: Literal["zero", "repeat", "cumulative", "query_len"] = "zero"
    optional: bool = False
    least: int | None = None
    most: int | None = None
    _axis: Axis | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        choice("zero", "repeat", "cumulative", "query_len")("pad", self.pad)
        flag("optional", self.optional)
        for name in ("least", "most"):
            check_kind(name, getattr(self, name), int)
        # The only way to set a field of a frozen dataclass.
        object.__setattr__(self, "_axis", None if self.axis is None else Axis.parse(self.axis))

    def fitted(
        self,
        key: str,
        value: Any,
        tokens: int,
        reqs: int | None,
        *,
        query_len: int | None = None,
        live: Batch | None = None,
    ) -> Any:
        """`value` padded for a graph of `tokens` and `reqs`; raises `InvalidUpdateError`.

        `query_len` is that of a uniform graph, `live` the batch that the step serves.
        """
        axis = self._axis
        if axis is None:
            # A copy, so that a list that the host changes in place is seen as changed.
            return value if type(value) is int else copy.copy(value)
        values = _whole(key, value, axis.name)
        size = None if reqs is None and axis.name == "reqs" else axis.size(tokens, reqs or 0)
        missing = 0 if size is None else size - len(values)
        if self.pad == "cumulative":
            _check_rising(key, values, tokens, query_len)
        if not values or missing < 0:
            raise InvalidUpdateError(
                f"host argument {key!r} has the wrong length",
                got=len(values),
                expected=f"1 to {size} ({self.axis} of the graph)",
                advice="pass one value for each live request",
            )
        self._check_bounds(key, values)
        if live is not None:
            self._check_live(key, values, axis, live)
        if self.pad == "zero":
            return values + [0] * missing
        if self.pad == "query_len":
            return values + [query_len or 0] * missing
        if self.pad == "repeat":
            return values + [values[-1]] * missing
        return values + _padding_ends(key, values, missing, tokens, query_len)

    def _check_bounds(self, key: str, values: list[int]) -> None:
        least, most = self.least, self.most
        if (least is not None and min(values) < least) or (most is not None and max(values) > most):
            raise InvalidUpdateError(
                f"host argument {key!r} has a value out of its bounds",
                got=values,
                expected=f"each from {least} to {most}",
                advice="pass the lengths of this step; a graph serves none that are longer than "
                "what it was captured for",
            )

    def _check_live(self, key: str, values: list[int], axis: Axis, live: Batch) -> None:
        needed = live.num_tokens if axis.counts == "tokens" else live.num_reqs
        if needed is None:
            return
        if len(values) < needed:
            raise InvalidUpdateError(
                f"host argument {key!r} leaves out live {axis.name}",
                got=f"{len(values)} values",
                expected=f"one for each of {needed}",
                advice="pass one value for each live request, in the order of the batch",
            )
        if self.pad == "cumulative" and values[needed - 1] != live.num_tokens:
            raise InvalidUpdateError(
                f"cumulative host argument {key!r} does not add up to the batch",
                got=f"{values[needed - 1]} at live request {needed}",
                expected=f"{live.num_tokens}, the live tokens",
                advice="pass the running sum of the query lengths of this batch",
            )


def _whole(key: str, value: Any, axis: str) -> list[int]:
    """The values as ints."""
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        raise InvalidUpdateError(
            f"host argument {key!r} is on the device, where reading it would wait for it",
            got=str(value.device),
            expected="a list, or a tensor on the host",
            advice="pass the list from which the scheduler made that tensor",
        )
    cause = None
    try:
        # Without places, as in a set or a generator, nobody knows whose value is whose.
        if hasattr(value, "__getitem__") and not (isinstance(value, Mapping) or _is_mask(value)):
            return list(map(index, value))
    except TypeError as error:
        cause = error
    raise InvalidUpdateError(
        f"host argument {key!r} is no list of whole numbers",
        got=shown(value),
        expected=f"one whole number for each of the {axis}",
        advice="pass a list of ints",
    ) from cause


def _is_mask(values: Any) -> bool:
    """Whether these are flags, which are whole numbers to Python."""
    if isinstance(values, torch.Tensor):
        return values.dtype is torch.bool
    return len(values) > 0 and type(values[0]) is bool


def _check_rising(key: str, values: list[int], tokens: int, query_len: int | None) -> None:
    rising = all(a <= b for a, b in pairwise(values))
    if not values or not rising or values[0] < 0 or values[-1] > tokens:
        raise InvalidUpdateError(
            f"cumulative host argument {key!r} does not add up",
            got=values,
            expected=f"rising values of at most {tokens} tokens",
            advice="pass the running sum of the query lengths",
        )
    if query_len is not None and any(b - a > query_len for a, b in pairwise([0, *values])):
        raise InvalidUpdateError(
            f"cumulative host argument {key!r} does not add up: a request has too many tokens",
            got=values,
            expected=f"at most {query_len} more each, the query length of the graph",
            advice="dispatch the batch without query_len=, as one of mixed lengths",
        )


def _padding_ends(
    key: str, values: list[int], missing: int, tokens: int, query_len: int | None
) -> list[int]:
    """Where the padding requests of cumulative lengths end."""
    last, spread = values[-1], query_len or tokens
    if tokens - last > spread * missing:
        raise InvalidUpdateError(
            f"cumulative host argument {key!r} does not add up",
            got=values,
            expected=f"the last one to be {tokens}, as the padding tokens need a request too"
            if query_len is None or not missing
            else f"the last one to be at least {tokens - spread * missing}, as each of {missing} "
            f"padding requests has {query_len} tokens",
            advice='declare it with axis "reqs+1", or pad the batch to its own tokens',
        )
    if query_len is None:
        return [last] * (missing - 1) + [tokens] * (missing > 0)
    return [min(tokens, last + query_len * (place + 1)) for place in range(missing)]
