"""One vote as bytes, of which the minimum over all ranks is the result.

NCCL has no bitwise AND, so a graph is a byte: 0 for one that this rank cannot use, 1 for one whose
step it has to try, 2 for one that it can replay. What has to be equal is sent twice, once as its
complement: the two minima are complements of each other only where all ranks sent the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cmp_to_key
from typing import NamedTuple

from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.batch.descriptor import Batch
from graphrt.core.dispatch.dispatcher import GraphDispatcher
from graphrt.core.dispatch.ladders import preferred
from graphrt.core.dispatch.reasons import Dispatch, Reason

BYTES = 512
"""Of every vote, whatever there is to vote on: ranks that differ must still be able to say so."""

_DIGEST = 8
_STEP = 4
_EQUAL = _DIGEST + _STEP
_GOES_ON = 2 * _EQUAL
_GRAPHS = _GOES_ON + 1
MOST_GRAPHS = BYTES - _GRAPHS

UNUSABLE, TRIED, USABLE = 0, 1, 2


class Tally(NamedTuple):
    """The minimum of all votes: whether all are the same and at the same step, whether all go on,
    the best graph that all can use, by its place, and whether its step is tried."""

    same: bool
    same_step: bool
    goes_on: bool
    graph: int | None
    tried: bool


def encoded(digest: bytes, step: int, goes_on: bool, graphs: bytes) -> bytearray:
    """The bytes of a vote; `graphs` has a byte for each graph, the best first."""
    equal = digest[:_DIGEST] + (step % (1 << 8 * _STEP)).to_bytes(_STEP, "big")
    vote = bytearray(BYTES)
    vote[:_EQUAL] = equal
    vote[_EQUAL:_GOES_ON] = bytes(255 - byte for byte in equal)
    vote[_GOES_ON] = goes_on
    vote[_GRAPHS : _GRAPHS + len(graphs)] = graphs
    return vote


def decoded(least: Sequence[int]) -> Tally:
    """What the minimum of all votes says."""
    same = [
        low + high == 255 for low, high in zip(least[:_EQUAL], least[_EQUAL:_GOES_ON], strict=True)
    ]
    graph = next((at for at, vote in enumerate(least[_GRAPHS:]) if vote != UNUSABLE), None)
    tried = graph is not None and least[_GRAPHS + graph] == TRIED
    return Tally(all(same[:_DIGEST]), all(same[_DIGEST:]), bool(least[_GOES_ON]), graph, tried)


class Ballot:
    """The graphs of one dispatcher in the order in which ranks prefer them, and which of them can
    serve a batch. It holds as long as the dispatcher's `version`."""

    def __init__(self, dispatcher: GraphDispatcher) -> None:
        self.version = dispatcher.version
        published = {(graph.mode, graph.descriptor) for graph in dispatcher.published}
        graphs = [
            Dispatch(mode, descriptor, Reason.HIT, slot)
            for slot, (mode, descriptor) in enumerate(dispatcher.hits())
        ]
        self.graphs = sorted(graphs, key=cmp_to_key(_order))
        if len(self.graphs) > MOST_GRAPHS:
            raise InvalidOptionError(
                "ranks can vote on so many graphs",
                got=len(self.graphs),
                expected=f"at most {MOST_GRAPHS}",
                advice="plan fewer sizes, query lengths or variants",
            )
        self._published = [graph[:2] in published for graph in self.graphs]
        self._dispatcher = dispatcher
        self._answers: dict[Batch | None, bytes] = {}

    @property
    def text(self) -> list[str]:
        """The graphs, a line each, as ranks compare them."""
        return [f"{graph.mode.name} [{graph.descriptor}]" for graph in self.graphs]

    def usable(self, batch: Batch | None) -> bytes:
        """A byte for each graph, `USABLE` where it can serve the batch; None is an idle rank, which
        any graph serves."""
        answer = self._answers.get(batch)
        if answer is None:
            if len(self._answers) > 1024:
                self._answers.clear()
            serves = map(self._serves, self.graphs, self._published, [batch] * len(self.graphs))
            answer = self._answers[batch] = bytes(USABLE if each else UNUSABLE for each in serves)
        return answer

    def _serves(self, graph: Dispatch, published: bool, batch: Batch | None) -> bool:
        if batch is None or not published:
            return published
        return self._dispatcher.peek(batch, agreed=graph).slot >= 0


def _order(first: Dispatch, second: Dispatch) -> int:
    if preferred(first, second):
        return -1
    return 1 if preferred(second, first) else 0


def digest_of(lines: Sequence[str]) -> bytes:
    """What has to be equal on all ranks, in a few bytes."""
    return hashlib.sha256("\n".join(lines).encode()).digest()[:_DIGEST]
