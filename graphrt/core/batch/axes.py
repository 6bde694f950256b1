"""Batch axes: the dimensions of inputs and outputs that grow with a step's tokens or requests."""

from __future__ import annotations

from typing import NamedTuple

from graphrt.core.base import InvalidInputError


class Axis(NamedTuple):
    """A batch axis in a shape: "tokens" or "reqs", with a constant added ("reqs+1")."""

    name: str
    extra: int

    @classmethod
    def parse(cls, text: str) -> Axis:
        """From text like "tokens" or "reqs+1"; raises `InvalidInputError`."""
        name, _, extra = text.replace(" ", "").partition("+")
        if name not in ("tokens", "reqs") or (extra and not extra.isdigit()):
            raise InvalidInputError(
                "unknown batch axis in a shape",
                got=repr(text),
                expected='"tokens", "reqs", "reqs+1" or an int',
            )
        return cls(name, int(extra or 0))

    def size(self, tokens: int, reqs: int) -> int:
        return (tokens if self.name == "tokens" else reqs) + self.extra
