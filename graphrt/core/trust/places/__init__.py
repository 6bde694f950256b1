"""What the Python side of a forward holds: its tensors, its plain values, and the way to them."""

from graphrt.core.trust.places.found import Places, places_of
from graphrt.core.trust.places.kinds import Kind, Shape, is_array, shape_of
from graphrt.core.trust.places.links import LengthLink, Link, SlotLink, TensorLink
from graphrt.core.trust.places.slots import MISSING, Place
from graphrt.core.trust.places.values import same_value

__all__ = [
    "MISSING",
    "Kind",
    "LengthLink",
    "Link",
    "Place",
    "Places",
    "Shape",
    "SlotLink",
    "TensorLink",
    "is_array",
    "places_of",
    "same_value",
    "shape_of",
]
