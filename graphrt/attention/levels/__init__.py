"""The levels that attention backends of engines declare, as data, and how to look one up."""

from graphrt.attention.levels.facts import FACTS, Condition, Fact, KnownBackend, Level
from graphrt.attention.levels.known import FAMILIES
from graphrt.attention.levels.lookup import (
    facts_of,
    get_cudagraph_support,
    known_backend,
    known_backends,
    level_of,
)

__all__ = [
    "FACTS",
    "FAMILIES",
    "Condition",
    "Fact",
    "KnownBackend",
    "Level",
    "facts_of",
    "get_cudagraph_support",
    "known_backend",
    "known_backends",
    "level_of",
]
