"""Pieces: each compiled once, wrapped for capture, and stitched into one call."""

from graphrt.compile.pieces.assembly import Built, build
from graphrt.compile.pieces.figures import Figures
from graphrt.compile.pieces.partition import partitions
from graphrt.compile.pieces.places import ArgumentPlaces
from graphrt.compile.pieces.static_sizes import check_one_size, check_sizes, wanted_sizes
from graphrt.compile.pieces.wrapping import Wrapping

__all__ = [
    "ArgumentPlaces",
    "Built",
    "Figures",
    "Wrapping",
    "build",
    "check_one_size",
    "check_sizes",
    "partitions",
    "wanted_sizes",
]
