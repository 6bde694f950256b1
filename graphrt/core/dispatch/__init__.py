"""Which captured graph serves a batch."""

from graphrt.core.dispatch.dispatcher import GraphDispatcher
from graphrt.core.dispatch.index import NOT_FOUND
from graphrt.core.dispatch.order import preferred
from graphrt.core.dispatch.reasons import NOT_REPLAYED, Dispatch, Reason
from graphrt.core.dispatch.tables import Reserved
from graphrt.core.dispatch.uniform import checked_batch, live_query_len, unpadded

__all__ = [
    "NOT_FOUND",
    "NOT_REPLAYED",
    "Dispatch",
    "GraphDispatcher",
    "Reason",
    "Reserved",
    "checked_batch",
    "live_query_len",
    "preferred",
    "unpadded",
]
