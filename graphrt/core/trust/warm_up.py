"""The eager runs of a capture session, watched: what the forward reads and writes, found and
protected without being declared."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

from graphrt.core.capture import SavedState
from graphrt.core.trust.moving import Moving
from graphrt.core.trust.places import places_of
from graphrt.core.trust.reads import Reads
from graphrt.core.trust.watching import SavedWrites, Trace, Watch

T = TypeVar("T")


class WarmedUp(NamedTuple):
    """What the warm-up of one kind of graph did, at its largest size."""

    tokens: int
    trace: Trace


class WatchedState:
    """State of a forward, for the time of one session: what is declared, and, if `reads` is there,
    what its warm-ups write. `restore` puts it back after every run, `settle` ends the session.

    `pads` are the padding values of index inputs: rows that may be written.
    """

    def __init__(
        self,
        declared: SavedState,
        *,
        limit_bytes: int,
        forward: Any,
        reads: Reads | None,
        warmed_up: dict[Hashable, WarmedUp],
        pads: Sequence[int],
    ) -> None:
        self._declared = declared
        self._forward = forward
        self._reads = reads
        self._warmed_up = warmed_up
        self._pads = pads
        self._saves = SavedWrites(limit_bytes)
        self._moving: Moving | None = None
        self._looked = False

    def run(self, kind: Hashable, tokens: int, own: frozenset[int], function: Callable[[], T]) -> T:
        """Run a forward of so many tokens eagerly; it is watched if it is the largest of its kind
        so far. `own` are the addresses of the storages of its inputs.

        Raises `StateTooLargeError` if it writes what can be neither saved nor left.
        """
        reads = self._reads
        if reads is None:
            return function()
        if self._moving is None:
            self._moving = Moving(places_of(self._forward))
        known = self._warmed_up.get(kind)
        if known is not None and known.tokens >= tokens:
            return function()
        watch = Watch(own, self._saves)
        result = watch.around(function)
        reads.note(watch)
        self._warmed_up[kind] = WarmedUp(tokens, watch.trace)
        if not self._looked:
            self._moving.look()
            self._looked = True
        return result

    def restore(self) -> None:
        """Put back what was declared and what was found."""
        self._declared.restore()
        self._saves.restore()

    def settle(self) -> None:
        """Put back what still moves in Python, and look at memory that only padding protects."""
        if self._moving is not None:
            self._moving.settle()
        if self._reads is not None:
            self._reads.protected += self._saves.check_protected(self._pads)
