"""What names a graph, and which of two is the better (DESIGN 6)."""

from __future__ import annotations

from typing import Protocol

from graphrt.core.base import InvalidBatchError, InvalidModeError, shown
from graphrt.core.batch import BatchDescriptor, GraphMode

_INF = float("inf")
_BEST_FIRST = (GraphMode.FULL, GraphMode.PIECEWISE)


class Graph(Protocol):
    """A graph that may serve a batch."""

    @property
    def mode(self) -> GraphMode: ...

    @property
    def descriptor(self) -> BatchDescriptor: ...


def checked_key(
    mode: GraphMode | str, descriptor: BatchDescriptor
) -> tuple[GraphMode, BatchDescriptor]:
    """What names a graph.

    Raises `InvalidModeError` unless the mode is PIECEWISE or FULL, and `InvalidBatchError` for what
    is no descriptor.
    """
    mode = GraphMode.parse(mode)
    if mode not in _BEST_FIRST:
        raise InvalidModeError(
            "a graph is captured and served in one runtime mode",
            got=mode.name,
            expected="PIECEWISE or FULL",
            advice="pass the mode that the graph was captured in",
        )
    if not isinstance(descriptor, BatchDescriptor):
        raise InvalidBatchError(
            "a graph is named by its descriptor",
            got=shown(descriptor),
            expected="BatchDescriptor(num_tokens, num_reqs, ...)",
            advice="BatchDescriptor(num_tokens=4)",
        )
    return mode, descriptor


def preferred(first: Graph, second: Graph) -> bool:
    """Whether `first` is the better of two graphs that can both serve a batch."""
    axes = max(len(first.descriptor.bounds), len(second.descriptor.bounds))
    return preference(first, axes) < preference(second, axes)


def preference(graph: Graph, axes: int) -> tuple[object, ...]:
    """The least of the compatible graphs is the best; `axes` is how many bounds are compared."""
    descriptor = graph.descriptor
    return (
        _BEST_FIRST.index(graph.mode),
        descriptor.num_tokens,
        descriptor.lora_capacity,
        not descriptor.uniform,
        tuple(bound_of(descriptor, axis) for axis in range(axes)),
        _INF if descriptor.num_reqs is None else descriptor.num_reqs,
    )


def bound_of(graph: BatchDescriptor, axis: int) -> float:
    return graph.bounds[axis] if axis < len(graph.bounds) else _INF
