"""What a step is: modes, descriptors, batch axes, the context."""

from graphrt.core.batch.axes import Axis
from graphrt.core.batch.context import (
    AllowedCapture,
    Announcer,
    ForwardContext,
    carry_context,
    current_context,
    forward_context,
)
from graphrt.core.batch.descriptor import (
    NO_MODES,
    NOT_FOUND,
    Batch,
    BatchDescriptor,
    checked_batch,
    checked_variant,
    descriptor_of,
    is_plain,
    live_query_len,
    same,
    same_in_python,
    settled,
    unpadded,
)
from graphrt.core.batch.modes import AttentionSupport, GraphMode, PieceProvider, graphs_off

__all__ = [
    "NOT_FOUND",
    "NO_MODES",
    "AllowedCapture",
    "Announcer",
    "AttentionSupport",
    "Axis",
    "Batch",
    "BatchDescriptor",
    "ForwardContext",
    "GraphMode",
    "PieceProvider",
    "carry_context",
    "checked_batch",
    "checked_variant",
    "current_context",
    "descriptor_of",
    "forward_context",
    "graphs_off",
    "is_plain",
    "live_query_len",
    "same",
    "same_in_python",
    "settled",
    "unpadded",
]
