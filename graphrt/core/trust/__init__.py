"""Whether a graph still stands for its forward: watching warm-ups, trying graphs, checks."""

from graphrt.core.trust.ambient import Ambient
from graphrt.core.trust.gradients import Gradients
from graphrt.core.trust.parts import PartResults
from graphrt.core.trust.places import places_of
from graphrt.core.trust.reads import Parameters, ReadSet, Tensors, TensorUse, check_parameters
from graphrt.core.trust.trial import Trial, TriedGraph
from graphrt.core.trust.verdict import Verdict
from graphrt.core.trust.warm_up import WarmedUp, WatchedState
from graphrt.core.trust.watching import (
    UnknownBlock,
    UnknownMemory,
    Use,
    Watch,
    WorkCount,
    address_of,
    unknown_memory,
)

__all__ = [
    "Ambient",
    "Gradients",
    "Parameters",
    "PartResults",
    "ReadSet",
    "TensorUse",
    "Tensors",
    "Trial",
    "TriedGraph",
    "UnknownBlock",
    "UnknownMemory",
    "Use",
    "Verdict",
    "WarmedUp",
    "Watch",
    "WatchedState",
    "WorkCount",
    "address_of",
    "check_parameters",
    "places_of",
    "unknown_memory",
]
