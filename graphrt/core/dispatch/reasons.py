"""The answers of dispatch: the graph that serves a batch, or the reason why none does."""

from __future__ import annotations

import enum
from typing import NamedTuple

from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode


class Reason(enum.Enum):
    """Why a step runs the way it does. The last two are of single calls inside of a step, which
    wrappers count (`GraphWrapper.eager_calls`). Dispatch gives the others; MISSING_GRAPH,
    QUARANTINED, SETTINGS_CHANGED, CHANGED and FAILED take the place of a HIT that was not
    replayed."""

    HIT = "a captured graph serves the batch"
    TOO_LARGE = "more tokens than any captured graph has"
    NO_GRAPH = "no captured graph is compatible with the batch"
    MODE_NONE = "graphs are off"
    EXCLUDED = "the modes that could serve the batch were excluded"
    PADDING = "the smallest compatible graph would pad more than allowed"
    NOT_CAPTURED = "a compatible graph is planned but not captured"
    RANKS_DISAGREE = "other ranks cannot run the graph that this one could"
    MISSING_GRAPH = "the step was announced as one of a graph that the wrapper does not have"
    QUARANTINED = "the graph of the batch failed a check"
    SETTINGS_CHANGED = "a setting such as autocast is not what it was at capture"
    CHANGED = "the host has changed what the graph may have baked in, and ranks try it next time"
    FAILED = "the step of a graph raised"
    NO_CONTEXT = "the call was made outside of a forward context"
    SEALED = "an unseen descriptor after seal() ran eagerly"

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"Reason.{self.name}"


class Dispatch(NamedTuple):
    """How to run a batch. With mode NONE, `descriptor` is the batch itself, unpadded.

    `slot` is the integer by which wrappers find their entry; -1 without a graph.
    """

    mode: GraphMode
    descriptor: BatchDescriptor
    reason: Reason
    slot: int = -1

    def __repr__(self) -> str:
        graph = f", slot {self.slot}" if self.slot >= 0 else ""
        return f"Dispatch({self.mode.name} [{self.descriptor}], {self.reason.name}{graph})"


Agreed = BatchDescriptor | Dispatch
"""The graph that ranks agree on: its descriptor, or the dispatch of one of them."""

OF_CALLS = (Reason.NO_CONTEXT, Reason.SEALED)
"""The reasons that wrappers count; the others are counted by the dispatcher."""
