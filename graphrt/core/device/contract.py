"""What a platform and core agree on and hand each other: the version of the contract, capabilities,
graphs, events, updates of tasks, figures of a device, and what an error came from."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from graphrt.core.base.errors import CaptureError, PlatformError
from graphrt.core.base.texts import error_line

CONTRACT_VERSION = 2
"""The version of the device contract. It grows when a platform that was right before may not be any
longer. 2 has no input ring and shares no executables; a platform of 1 that had neither still works.
"""

OLDEST_CONTRACT = 1
"""The oldest version whose platforms still work."""


class Capability(enum.Enum):
    """What a platform can do beyond running eagerly, and the methods that it supplies for that.
    Core asks for these, never for a device."""

    CAPTURE = "capture"
    """Work can be captured as graphs and replayed."""
    SHARED_POOL = "shared_pool"
    """Graphs in one memory use each other's blocks: `owns` and `weak_ref` tell and release them."""
    ALLOCATE_IN_POOL = "allocate_in_pool"
    """`allocate_in`."""
    STREAMS = "streams"
    """Work is issued on streams: the methods under "Streams"."""
    TASK_UPDATE = "task_update"
    """`task_begin`, `task_end` and `replay_updated`."""
    RANDOM = "random"
    """Random operators of a graph draw new numbers at every replay."""
    HOST_POOL = "host_pool"
    """`adopt_memory` and `memory_handle`."""
    FREE_FAILURES = "free_failures"
    """A capture that fails is taken back whole, and costs its time alone. Sizes after the first of
    a kind are then captured without a warm-up, and warmed up only if that fails."""


def check_contract(platform: Any) -> None:
    """Raise `PlatformError` for a platform that was written for another version of the
    contract."""
    version = platform.contract_version
    if version not in range(OLDEST_CONTRACT, CONTRACT_VERSION + 1):
        raise PlatformError(
            f"platform {type(platform).__name__} was written for another version of the contract",
            got=f"contract_version = {version!r}",
            expected=f"{OLDEST_CONTRACT} to {CONTRACT_VERSION}, which this graphrt has",
            advice="install the newer version of the plugin, or of graphrt",
        )


class DeviceGraph(Protocol):
    """A captured graph. `torch.cuda.CUDAGraph` and `torch.npu.NPUGraph` satisfy it as they are.

    Core always launches through this public `replay`, so that profilers that patch it see it.
    """

    def replay(self) -> None:
        """Launch what was captured, on the current stream."""

    def reset(self) -> None:
        """Destroy it, and give up its share of the memory."""


class GraphPointers(NamedTuple):
    """What the nodes of a graph hold that may be addresses of device memory.

    `nodes` has the words of each node that has some; a word need not be an address. `unread` counts
    the nodes that may touch memory without the device telling where.
    """

    nodes: Sequence[Collection[int]]
    unread: int


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


class DeviceEvent(Protocol):
    """A point in a stream. `torch.cuda.Event` and `torch.npu.Event` satisfy it as they are."""

    def record(self, stream: Any) -> None:
        """Mark this point of `stream`."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def synchronize(self) -> None:
        """Wait on the host until it has."""


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

    def tensors(self) -> list[torch.Tensor]:
        """The captured tensors: all memory that the task may touch."""


@dataclass(frozen=True)
class StreamRoom:
    """Streams that are free for graphs now, and how many of them must stay free."""

    free: int
    reserve: int = 0

    @property
    def usable(self) -> int:
        """Streams that graphs may take."""
        return max(0, self.free - self.reserve)


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


@dataclass(frozen=True)
class MemoryFigures:
    """Device memory in bytes."""

    free_bytes: int
    total_bytes: int


@dataclass(slots=True)
class UpdateFigures:
    """How the tasks of graphs were given new host arguments."""

    tasks: int = 0
    """Tasks that were captured."""
    reissues: int = 0
    """How often a task was issued again, in a capture of its own."""
    patches: int = 0
    """Launches of a graph (kernels, copies, fills) whose parameters were set."""
    failed: int = 0
    """Updates of a task that raised."""


class Unexplained(CaptureError):
    """Stands for an error in a capture that no device is known to raise: it is the forward's own,
    and is raised as it is."""

    @classmethod
    def of(cls, error: BaseException) -> Unexplained:
        """The explanation of an error that has none."""
        return cls(
            f"capture failed: {error_line(error)}",
            advice="run the same forward eagerly; if that passes, look for what cannot be captured",
        )


class FirstCallError(CaptureError):
    """A library cannot be called for the first time inside of a capture. After a warm-up it may."""


class EndedCaptureError(CaptureError):
    """Something that raised nothing in the capture has ended it, such as another thread. A further
    attempt may succeed: a runner makes one."""

    @classmethod
    def of(cls, got: object) -> EndedCaptureError:
        """The error of a device that says so with `got`."""
        return cls(
            "something has ended the capture that raised nothing in it: another thread waited for "
            "the device, or the forward caught an error of device work",
            got=got,
            advice="hold `GraphPool.capture_lock` in other threads around calls that wait for the "
            "whole device, as torch.cuda.synchronize(); catch no such errors in the forward",
        )


def error_chain(
    error: BaseException, leave_out: type[BaseException] | None = None
) -> Iterator[BaseException]:
    """`error` and all that it came from, each once, nearest first.

    Errors of the type `leave_out` that it came from are skipped, with all that only they lead to.
    """
    seen: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop(0)
        # Not `in`: an error may define equality.
        if link is None or any(link is each for each in seen):
            continue
        if leave_out is not None and isinstance(link, leave_out) and link is not error:
            continue
        seen.append(link)
        yield link
        pending += [link.__cause__, link.__context__]
