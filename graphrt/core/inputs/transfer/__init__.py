"""How a step's inputs get to the device: copied before its launch, or fetched by its graph."""

from graphrt.core.inputs.transfer.by_copy import ByCopy
from graphrt.core.inputs.transfer.by_fetch import ByFetch
from graphrt.core.inputs.transfer.ring import SlotRing, ring_for
from graphrt.core.inputs.transfer.slot import (
    Arrays,
    InputSlot,
    SlotViews,
    agreed_too_late,
    views_in,
)
from graphrt.core.inputs.transfer.writes import PadSource, Slab

__all__ = [
    "Arrays",
    "ByCopy",
    "ByFetch",
    "InputSlot",
    "PadSource",
    "Slab",
    "SlotRing",
    "SlotViews",
    "agreed_too_late",
    "ring_for",
    "views_in",
]
