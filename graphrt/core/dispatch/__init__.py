"""Which captured graph serves a batch."""

from graphrt.core.dispatch.asked import checked_batch, live_query_len, unpadded
from graphrt.core.dispatch.dispatcher import NOT_FOUND, GraphDispatcher, Reserved
from graphrt.core.dispatch.ladders import preferred
from graphrt.core.dispatch.reasons import NOT_REPLAYED, Agreed, Dispatch, Reason

__all__ = [
    "NOT_FOUND",
    "NOT_REPLAYED",
    "Agreed",
    "Dispatch",
    "GraphDispatcher",
    "Reason",
    "Reserved",
    "checked_batch",
    "live_query_len",
    "preferred",
    "unpadded",
]
