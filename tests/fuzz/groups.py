"""How often a statement is of which kind."""

from __future__ import annotations

from tests.fuzz.effects import HOST, IN_PLACE, MIXING, RANDOM, STATE
from tests.fuzz.operators import INDEXING, MATRIX, POINTWISE, ROWS, VIEWS, Template

GROUPS: dict[str, tuple[float, list[Template]]] = {
    "pointwise": (6, POINTWISE),
    "rows": (3, ROWS),
    "matrix": (2.5, MATRIX),
    "indexing": (2, INDEXING),
    "views": (4, VIEWS),
    "in place": (4, IN_PLACE),
    "state": (2.5, STATE),
    "mixing": (0.12, MIXING),
    "random": (0.25, RANDOM),
    "host": (0.08, HOST),
}
"""How often a statement is of each group, and what there is."""
