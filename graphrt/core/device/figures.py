"""Figures of a device: its limits and memory, and what sharing and updating graphs brought."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What the device runs out of; None means no limit that matters."""

    streams: int | None = None
    graphs: int | None = None


@dataclass(frozen=True)
class MemoryFigures:
    """Device memory in bytes."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class SharingFigures:
    """What it brought, and costs, that graphs of equal structure share executables."""

    graphs: int
    executables: int
    nodes: int
    """Nodes of the executables there are."""
    nodes_saved: int
    """Nodes of the executables that were given up; memory is about in proportion."""
    switches: int
    switch_s: float
    """Host seconds of all switches; replaying the same graph again needs none."""


@dataclass(frozen=True, slots=True)
class UpdateFigures:
    """How the tasks of graphs were given new host arguments."""

    node_patches: int = 0
    """Nodes whose parameters were set in an executable, one by one."""
    sibling_patches: int = 0
    """Of these, nodes of tasks that took their parameters from a layer that is issued alike."""
    reissues: int = 0
    """Tasks that were issued again, in a capture of their own."""
    memo_hits: int = 0
    """Tasks whose parameters for the same host arguments were still known."""
    self_checks: int = 0
    """Comparisons of all layers of a kind with what would have been patched."""
    self_check_failures: int = 0
    """Comparisons that differed, and representatives that others could not be patched from; the
    layers were issued each."""
    whole_updates: int = 0
    """Executables that were given all parameters at once, as a node could not be set."""
    reinstantiations: int = 0
    """Executables that were made anew, as they could not be given all parameters at once."""
    failed: int = 0
    """Replays whose update raised; `Reason.UPDATE_FAILED` counts those that ran eagerly then."""
