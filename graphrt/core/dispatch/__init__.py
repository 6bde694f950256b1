"""Which captured graph serves a batch."""

from graphrt.core.dispatch.dispatcher import GraphDispatcher, Reserved
from graphrt.core.dispatch.ladders import preferred
from graphrt.core.dispatch.reasons import NOT_REPLAYED, Agreed, Dispatch, Reason

__all__ = [
    "NOT_REPLAYED",
    "Agreed",
    "Dispatch",
    "GraphDispatcher",
    "Reason",
    "Reserved",
    "preferred",
]
