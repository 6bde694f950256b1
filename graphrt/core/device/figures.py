"""Figures of a device: its streams and memory, and what updating tasks took."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphrt.core.base.homes import public


@public("graphrt.platforms")
@dataclass(frozen=True)
class StreamRoom:
    """Streams that are free for graphs now, and how many of them must stay free."""

    free: int
    reserve: int = 0

    @property
    def usable(self) -> int:
        """Streams that graphs may take."""
        return max(0, self.free - self.reserve)


@public("graphrt.platforms")
@dataclass
class GraphWork:
    """What an eager run of a forward issued, from which follows what its graph will take.

    `operators` counts those that launch something, by the id of the stream they were issued on;
    `tasks` counts updatable tasks, whose operators are counted too; `breaks` the places where a
    capture in pieces ends one graph and begins the next.
    """

    operators: dict[int, int] = field(default_factory=dict)
    tasks: int = 0
    breaks: int = 0
    collectives: bool = False
    """Whether ranks communicate, which devices do on streams of their own."""
    in_pieces: bool = False
    """Whether it will be captured in pieces, between its breaks."""

    @property
    def graphs(self) -> int:
        """Device graphs that it is captured as."""
        return self.breaks + 1 if self.in_pieces else 1


@public("graphrt.platforms")
@dataclass(frozen=True)
class MemoryFigures:
    """Device memory in bytes."""

    free_bytes: int
    total_bytes: int


@public("graphrt.platforms")
@dataclass(frozen=True, slots=True)
class UpdateFigures:
    """How the tasks of graphs were given new host arguments."""

    patches: int = 0
    """Launches of a graph (kernels, copies, fills) whose parameters were set, one by one."""
    shared_patches: int = 0
    """Of these, launches of tasks that took their parameters from a task that is issued alike."""
    reissues: int = 0
    """Tasks that were issued again, in a capture of their own."""
    memo_hits: int = 0
    """Tasks whose parameters for the same host arguments were still known."""
    self_checks: int = 0
    """Comparisons of all tasks that are issued alike with what would have been patched."""
    self_check_failures: int = 0
    """Comparisons that differed, and tasks that others could not be patched from; each was issued
    then."""
    whole_updates: int = 0
    """Executables that were given all parameters at once, as a launch could not be set."""
    rebuilds: int = 0
    """Executables that were made anew, as they could not be given all parameters at once."""
    failed: int = 0
    """Replays whose update raised."""
