"""What the Python side of a forward holds: its tensors, its plain values, and the way to them."""

from graphrt.core.trust.places.kinds import Kind, Shape, is_array, shape_of
from graphrt.core.trust.places.slots import FIXED, MISSING, Place, same_value
from graphrt.core.trust.places.walk import Link, Places, places_of, where_is

__all__ = [
    "FIXED",
    "MISSING",
    "Kind",
    "Link",
    "Place",
    "Places",
    "Shape",
    "is_array",
    "places_of",
    "same_value",
    "shape_of",
    "where_is",
]
