"""Splitting: opaque operators, cutting a traced graph at them, and which pieces are the same."""

from graphrt.compile.split.contexts import restoring_settings
from graphrt.compile.split.define import opaque
from graphrt.compile.split.effects import name_of, written
from graphrt.compile.split.graph import Piece, attribute_of, returned_count, split, written_between
from graphrt.compile.split.identity import fingerprint, target_name
from graphrt.compile.split.operators import (
    DEFAULT_SPLITTING_OPS,
    names_of,
    splits_at,
    splitting_names,
)

__all__ = [
    "DEFAULT_SPLITTING_OPS",
    "Piece",
    "attribute_of",
    "fingerprint",
    "name_of",
    "names_of",
    "opaque",
    "restoring_settings",
    "returned_count",
    "split",
    "splits_at",
    "splitting_names",
    "target_name",
    "written",
    "written_between",
]
