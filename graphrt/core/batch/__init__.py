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
    Batch,
    BatchDescriptor,
    checked_bounds,
    checked_count,
    checked_variant,
    plain_bounds,
)
from graphrt.core.batch.modes import AttentionSupport, GraphMode, PieceProvider, graphs_off

__all__ = [
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
    "checked_bounds",
    "checked_count",
    "checked_variant",
    "current_context",
    "forward_context",
    "graphs_off",
    "plain_bounds",
]
