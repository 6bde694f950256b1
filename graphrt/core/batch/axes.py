"""Batch axes: the dimensions of inputs and outputs that grow with a step's tokens or requests.

A model without tokens (images, latents, features) has rows: the same axis by another name.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal, NamedTuple

from graphrt.core.base.errors import InvalidInputError
from graphrt.core.base.homes import public
from graphrt.core.base.option_values import items_of, nearest, refused

AXES = ("tokens", "rows", "reqs")
"""The names that users write."""

_AXIS = re.compile(r"\s*(\w+?)\s*(?:\+\s*(\d{1,18})\s*)?")


@public("graphrt.types")
class Axis(NamedTuple):
    """A batch axis in a shape, with a constant added: "tokens", "rows", "reqs" or "reqs+1"."""

    name: str
    extra: int = 0

    @classmethod
    def parse(cls, text: object, names: Collection[str] | None = AXES) -> Axis:
        """From text like "tokens" or "reqs+1"; any name if `names` is None.

        Raises `InvalidInputError`.
        """
        known = None
        if names is not None:
            listed = items_of("names", names, '("tokens", "reqs")', InvalidInputError)
            known = [name for name in listed if isinstance(name, str)]
        match = _AXIS.fullmatch(text) if isinstance(text, str) else None
        if match is None or (known is not None and match[1] not in known):
            meant = nearest(match[1] if match else text, known or AXES)
            extra = f"+{match[2]}" if match and match[2] else ""
            right = f'"{meant}{extra}"' if meant else '("tokens",), or ("reqs", 64) for rows of 64'
            what = "unknown batch axis in a shape"
            expected = '"tokens", "rows", "reqs", "reqs+1" or an int'
            raise refused(what, text, expected, right, InvalidInputError)
        return cls(match[1], int(match[2] or 0))

    @property
    def counts(self) -> Literal["tokens", "reqs"]:
        """What of a batch it grows with: rows are what a `Batch` calls tokens."""
        return "reqs" if self.name == "reqs" else "tokens"

    def size(self, tokens: int, reqs: int) -> int:
        """The size of a dimension of this axis in a batch of so many tokens and requests."""
        return (reqs if self.name == "reqs" else tokens) + self.extra

    def __str__(self) -> str:
        return f"{self.name}+{self.extra}" if self.extra else self.name
