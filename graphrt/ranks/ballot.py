"""One vote as bytes, of which the minimum over all ranks is the result.

NCCL has no bitwise AND, so a graph is a byte: 0 for one that this rank cannot use, 1 for one that
it has to capture first, 2 for one whose step it has to try, 3 for one that it can replay. The
digest of the facts and the step must be equal. They are sent twice, once as complements: their two
minima are complements of each other only if all ranks sent the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.batch.descriptor import Batch
from graphrt.core.dispatch.dispatcher import GraphDispatcher
from graphrt.core.dispatch.ladders import preference
from graphrt.core.dispatch.reasons import Dispatch, Reason

BYTES = 512
"""The size of every vote, however many graphs: ranks that differ must still find that out."""

_DIGEST = 8
_STEP = 4
_EQUAL = _DIGEST + _STEP
_GRAPHS = 2 * _EQUAL
MOST_GRAPHS = BYTES - _GRAPHS

Facts = Mapping[str, list[str]]
"""What must be equal on all ranks: lines of text by name."""

UNUSABLE, MISSING, TRIED, USABLE = 0, 1, 2, 3
"""A rank's vote for a graph, which the lowest decides: it cannot serve the batch; it is planned and
not captured; its step is a trial; it can be replayed."""


class Tally(NamedTuple):
    """The result of a vote: whether all ranks have the same facts and are at the same step; the
    index of the best graph that all can use; and the lowest vote for it."""

    same: bool
    same_step: bool
    graph: int | None
    least: int


def encoded(digest: bytes, step: int, graphs: bytes) -> bytearray:
    """The bytes of a vote; `graphs` has a byte for each graph, the best first."""
    equal = digest[:_DIGEST] + (step % (1 << 8 * _STEP)).to_bytes(_STEP, "big")
    vote = bytearray(BYTES)
    vote[:_EQUAL] = equal
    vote[_EQUAL:_GRAPHS] = bytes(255 - byte for byte in equal)
    vote[_GRAPHS : _GRAPHS + len(graphs)] = graphs
    return vote


def decoded(least: Sequence[int]) -> Tally:
    """The tally of `least`, the minimum of all votes."""
    same = [
        low + high == 255 for low, high in zip(least[:_EQUAL], least[_EQUAL:_GRAPHS], strict=True)
    ]
    graph = next((index for index, vote in enumerate(least[_GRAPHS:]) if vote != UNUSABLE), None)
    vote = UNUSABLE if graph is None else least[_GRAPHS + graph]
    return Tally(all(same[:_DIGEST]), all(same[_DIGEST:]), graph, vote)


class Ballot:
    """Makes a rank's votes: has the graphs of one dispatcher, the best first, and tells which can
    serve a batch; with the `facts` that must be equal on all ranks, and their `digest`."""

    def __init__(self, dispatcher: GraphDispatcher, facts: Facts) -> None:
        self.dispatcher = dispatcher
        self._facts = facts
        # The dispatcher's `version` when its graphs were taken over.
        self._version: object = None
        self.renew()

    def renew(self) -> None:
        """Take over the dispatcher's graphs as they are now."""
        if self._version is self.dispatcher.version:
            return
        self._version = self.dispatcher.version
        published = {(graph.mode, graph.descriptor) for graph in self.dispatcher.published}
        graphs = [
            Dispatch(mode, descriptor, Reason.HIT, slot)
            for slot, (mode, descriptor) in enumerate(self.dispatcher.hits())
        ]
        self.graphs = sorted(graphs, key=preference)
        if len(self.graphs) > MOST_GRAPHS:
            raise InvalidOptionError(
                "the plan has more graphs than ranks can vote on",
                got=len(self.graphs),
                expected=f"at most {MOST_GRAPHS}",
                advice="plan fewer sizes, query lengths or variants",
            )
        # For each graph whether it is captured, and not only planned.
        self._published = [graph[:2] in published for graph in self.graphs]
        # Batch -> the answer of `usable`.
        self._answers: dict[Batch | None, bytes] = {}
        text = [f"{graph.mode.name} [{graph.descriptor}]" for graph in self.graphs]
        self.facts = {**self._facts, "next": ["a step"], "graphs": text}
        self.digest = digest_of(self.facts)

    def usable(self, batch: Batch | None) -> bytes:
        """A byte for each graph that can serve the batch: `USABLE`, or `MISSING` where it is
        planned only. None is an idle rank, which any graph serves."""
        answer = self._answers.get(batch)
        if answer is None:
            if len(self._answers) > 1024:
                self._answers.clear()
            answer = bytes(
                map(self._vote, self.graphs, self._published, [batch] * len(self.graphs))
            )
            self._answers[batch] = answer
        return answer

    def _vote(self, graph: Dispatch, published: bool, batch: Batch | None) -> int:
        if not published:
            planned = batch is None or self.dispatcher.planned_for(batch, agreed=graph)
            return MISSING if planned else UNUSABLE
        serves = batch is None or self.dispatcher.peek(batch, agreed=graph).slot >= 0
        return USABLE if serves else UNUSABLE


def digest_of(facts: Facts) -> bytes:
    """A hash of the facts, in a few bytes."""
    lines = [f"{name}: {line}" for name, lines in facts.items() for line in lines]
    return hashlib.sha256("\n".join(lines).encode()).digest()[:_DIGEST]
