"""What the Python side of a forward holds: its tensors, its plain values, and the way to them."""

from graphrt.core.trust.places.found import Places, places_of
from graphrt.core.trust.places.links import LengthLink, Link, SlotLink, TensorLink
from graphrt.core.trust.places.slots import MISSING, Place
from graphrt.core.trust.places.values import same_value

__all__ = [
    "MISSING",
    "LengthLink",
    "Link",
    "Place",
    "Places",
    "SlotLink",
    "TensorLink",
    "places_of",
    "same_value",
]
