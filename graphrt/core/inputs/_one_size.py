"""An axis of an output of which one size alone is known."""

from __future__ import annotations

from typing import NamedTuple

from graphrt.core.base import OutputError
from graphrt.core.inputs.output_axes import at_path


class OneSize(NamedTuple):
    """What may be a batch axis of the output at `path`: nothing but its size in one batch is known,
    as the forward runs at no other size."""

    name: str
    extra: int
    tokens: int
    reqs: int
    known: int
    path: str

    def size(self, tokens: int, reqs: int) -> int:
        """The size in a batch of so many tokens and requests; raises `OutputError` for another one
        than was seen."""
        if (tokens, reqs) != (self.tokens, self.reqs):
            raise OutputError(
                "it cannot be told which dimensions of the outputs are batch axes"
                f"{at_path(self.path)}: the forward runs at no other size than "
                f"{self.tokens} tokens, to compare",
                got=f"a step of {tokens} tokens of {reqs} requests",
                expected="outputs= with the axes of every tensor that the forward returns",
                advice='outputs=("tokens", width), or {"logits": ("tokens", width)}',
            )
        return self.known
