"""How a step's inputs get to the device: copied before its launch, or fetched by its graph."""

from graphrt.core.inputs.transfer.by_copy import ByCopy
from graphrt.core.inputs.transfer.by_fetch import ByFetch
from graphrt.core.inputs.transfer.ring import SlotRing, ring_for
from graphrt.core.inputs.transfer.slot import (
    NO_LIMITS,
    Arrays,
    InputSlot,
    Limits,
    SlotViews,
    views_in,
)
from graphrt.core.inputs.transfer.writes import PadSource, Slab

__all__ = [
    "NO_LIMITS",
    "Arrays",
    "ByCopy",
    "ByFetch",
    "InputSlot",
    "Limits",
    "PadSource",
    "Slab",
    "SlotRing",
    "SlotViews",
    "ring_for",
    "views_in",
]
