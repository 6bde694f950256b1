"""All graphs for batches of one kind, and why none of them serves one."""

from __future__ import annotations

from collections.abc import Sequence

from graphrt.core.dispatch.reasons import Reason
from graphrt.core.dispatch.tables import EXCLUDED, Reserved, Tables


class View(Tables):
    """The published graphs for batches of one kind, and `planned`, those that are only reserved.

    `beyond` is why more than `last` tokens have no graph.
    """

    __slots__ = ("beyond", "planned")

    def __init__(
        self, published: Sequence[Reserved], planned: Sequence[Reserved], room: int, *, off: bool
    ) -> None:
        super().__init__(published, room)
        self.planned = Tables(planned, room) if planned else None
        self.beyond = Reason.TOO_LARGE if published else Reason.NO_GRAPH
        if off:
            self.beyond = Reason.MODE_NONE
        if self.planned is not None:
            self.nbytes += self.planned.nbytes

    def answer(
        self, narrowed: int, tokens: int, agreed: int, reqs: int | None, ratio: float | None
    ) -> Reserved | Reason:
        """The best graph for a batch of these numbers, else why there is none.

        `narrowed` are the bits of modes that are taken out, `agreed` the tokens that ranks have
        agreed on or the batch's own, `reqs` its requests (None: any), `ratio` the most padding.
        """
        if self.planned is None and agreed > self.last and not narrowed and agreed == tokens:
            return self.beyond
        most = None if ratio is None else agreed * ratio
        found = self.find(narrowed, agreed, reqs, most)
        if found is not None:
            return found
        if self.beyond is Reason.MODE_NONE:
            return Reason.MODE_NONE
        if most is not None and self.find(narrowed, agreed, reqs):
            return Reason.PADDING
        excluded = narrowed & EXCLUDED
        if narrowed != excluded or agreed != tokens:
            own = None if ratio is None else tokens * ratio
            if self.find(excluded, tokens, reqs, own):
                return Reason.RANKS_DISAGREE
        if excluded and self.find(excluded ^ EXCLUDED, tokens, reqs):
            return Reason.EXCLUDED
        if self.planned is not None and self.planned.find(excluded, tokens, reqs):
            fits = self.planned.find(excluded, tokens, reqs, most)
            return Reason.PADDING if fits is None else Reason.NOT_CAPTURED
        return self.without_graph(agreed)

    def without_graph(self, tokens: int) -> Reason:
        """Why so many tokens have no graph, whatever the modes and requests."""
        return self.beyond if tokens > self.last else Reason.NO_GRAPH
