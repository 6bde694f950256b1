"""What a platform and core hand each other: graphs, events, and updates of tasks."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from graphrt.core.base.homes import public


@public("graphrt.platforms")
class DeviceGraph(Protocol):
    """A captured graph. `torch.cuda.CUDAGraph` and `torch.npu.NPUGraph` satisfy it as they are.

    Core always launches through this public `replay`, so that profilers that patch it see it.
    """

    def replay(self) -> None:
        """Launch what was captured, on the current stream."""

    def reset(self) -> None:
        """Destroy it, and give up its share of the memory."""


@public("graphrt.platforms")
class GraphPointers(NamedTuple):
    """What the nodes of a graph hold that may be addresses of device memory.

    `nodes` has the words of each node that has some; a word need not be an address. `unread` counts
    the nodes that may touch memory without the device telling where.
    """

    nodes: Sequence[Collection[int]]
    unread: int


@public("graphrt.platforms")
class MemoryBlock(NamedTuple):
    """A block that torch's allocator has given away, from `address` up to `end`, of which `bytes`
    were asked for.

    `in_graph_pool` says that it is memory of a graph pool, whosever that is. `may_be_internal` says
    that it has the size of what torch allocates for itself and makes no tensor of, such as the
    workspace of a library.
    """

    address: int
    end: int
    bytes: int
    in_graph_pool: bool = False
    may_be_internal: bool = False


@public("graphrt.platforms")
class DeviceEvent(Protocol):
    """A point in a stream. `torch.cuda.Event` and `torch.npu.Event` satisfy it as they are."""

    def record(self, stream: Any) -> None:
        """Mark this point of `stream`."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def synchronize(self) -> None:
        """Wait on the host until it has."""


@public("graphrt.platforms")
class TaskUpdate(Protocol):
    """One task of a graph, as it is to be at the coming replay; valid until that has begun.

    `handle` is what `Platform.task_end` returned. `values` are the new host arguments by name, for
    a device that is told them.
    """

    @property
    def name(self) -> str: ...

    @property
    def handle(self) -> Any: ...

    @property
    def values(self) -> Mapping[str, Any]: ...

    def issue(self) -> object:
        """Call the task's operator with the new host arguments, the captured tensors, outputs and
        workspace; it allocates nothing."""

    def likeness(self) -> Hashable:
        """Equal for tasks which are issued alike if their host arguments are equal: by the same
        function, with equal plain arguments and with tensors of which only the place differs."""

    def tensors(self) -> list[torch.Tensor]:
        """The captured tensors: all memory that the task may touch."""
