"""The device contract: what a platform supplies so that `core` can capture and replay on it; and
which of its devices is meant, and captured on."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from graphrt.core.base.errors import CaptureError, InvalidOptionError, MissingCapabilityError
from graphrt.core.base.option_values import shown
from graphrt.core.device.contract import (
    Capability,
    DeviceEvent,
    DeviceGraph,
    GraphPointers,
    GraphWork,
    MemoryBlock,
    MemoryFigures,
    StreamRoom,
    TaskUpdate,
    Unexplained,
    UpdateFigures,
)


@dataclass(frozen=True)
class Availability:
    """Whether this machine can run a platform, and why not."""

    available: bool
    reason: str = ""


class Platform(ABC):
    """One kind of device. Everything optional is a capability; the defaults do without it.

    A subclass is created once, when its plugin is discovered, and must not touch the device (nor
    import the device's library) before `availability()` is called. Everything else acts on the
    current device of the calling thread: core makes that the device of the pool.
    """

    name: str
    """The name by which `GRAPHRT_PLATFORM` and `platform=` choose it."""
    device_type: str
    """The `torch.device` type of its tensors."""
    contract_version: int = 1
    """The `CONTRACT_VERSION` that it was written for: a plugin says so in its own class."""
    capabilities: frozenset[Capability] = frozenset()
    """What it can do. Without `Capability.CAPTURE` every step runs eagerly."""
    capture_executes: bool = False
    """Whether the operators run while they are captured. Where they do not, core replays each
    segment right after its capture, so that a capturing call has the effect of one eager call."""
    needs_pinned_copies: bool = False
    """Whether a capture holds copies from page-locked host memory alone, which `host_buffer` gives.
    Where it does, core keeps the constants that a forward makes there."""
    raw_storages: bool = False
    """Whether torch's own storages can be made over memory of this device at any address. What a
    runner hands out is then no copy, but unreadable as soon as the next step overwrites it."""
    simulated: bool = False
    """Whether its device is a simulation, so that times on it mean nothing."""
    by_name_only: bool = False
    """Never the default: only `GRAPHRT_PLATFORM` and `platform=` choose it."""

    def start(self) -> None:
        """Called whenever a host is given the platform, which is available: it may load here what
        `availability()` must not. Raises `PlatformError` if that fails."""
        return None

    @abstractmethod
    def availability(self) -> Availability:
        """Whether this machine can run the platform. Never raises."""

    @abstractmethod
    def get_static_graph_wrapper_cls(self) -> str:
        """Dotted path of the `GraphWrapper` subclass of this platform."""

    def versions(self) -> dict[str, str]:
        """Versions worth printing in `graphrt doctor`, by library name."""
        return {}

    # Several devices -------------------------------------------------------------------------

    def device_count(self) -> int:
        """How many devices of this kind there are."""
        return 1

    def current_device(self) -> int | None:
        """The index of this thread's current device; None where devices have none."""
        return None

    def on_device(self, index: int | None) -> AbstractContextManager[object]:
        """Make the device of that index this thread's current one; None changes nothing."""
        return nullcontext()

    # Graphs and their memory -----------------------------------------------------------------

    @abstractmethod
    def new_memory(self) -> Any:
        """A handle of memory that graphs share when they never run concurrently."""

    def adopt_memory(self, handle: Any) -> Any:
        """As `new_memory`, over an allocator pool of the host (HOST_POOL), by such a handle as
        `memory_handle` gives: that pool lives at least until `release_memory`. Raises `PoolError`
        where it can no longer be entered."""
        raise MissingCapabilityError(f"platform {self.name!r} cannot adopt graph memory")

    def memory_handle(self, memory: Any) -> Any:
        """The allocator's handle of `memory`, with which the host captures into it by its own means
        (HOST_POOL), until `release_memory`."""
        raise MissingCapabilityError(f"platform {self.name!r} cannot show graph memory")

    @abstractmethod
    def new_graph(self) -> DeviceGraph:
        """A graph that nothing was captured into yet."""

    @abstractmethod
    def begin_capture(self, graph: Any, memory: Any) -> None:
        """Record this thread's work on the current stream into `graph`; host reads must raise."""

    @abstractmethod
    def end_capture(self, graph: Any) -> bool:
        """Finish recording; afterwards `graph.replay()` works.

        False says that nothing was recorded: `graph` is dropped then, and no step replays it.
        """

    @property
    def can_upload(self) -> bool:
        """Whether `upload` prepares a graph for its first replay."""
        return False

    def upload(self, graph: DeviceGraph) -> None:
        """Prepare a captured graph for its first replay, where `can_upload`: else every graph is
        replayed once at its capture, as the first replay alone prepares it."""
        return None

    @abstractmethod
    def abort_capture(self, graph: Any) -> None:
        """Drop a capture that failed, or whose begin or end raised; leaves no trace.

        Must not raise for a device error that the capture itself caused.
        """

    def reset_graphs(self, graphs: Sequence[DeviceGraph]) -> None:
        """Destroy graphs, which may still be running: a device may lose the streams of a graph
        that is reset under way, so the default waits for the device first. The current stream waits
        for their last replay already. Called under the capture lock, because some devices allow no
        synchronisation while anything is captured."""
        if graphs:
            self.synchronize()
        for graph in graphs:
            graph.reset()

    def update_figures(self, memory: Any) -> UpdateFigures | None:
        """How tasks of graphs in `memory` were updated; None where that is not counted, or there
        are none."""
        return None

    def allocate_in(self, memory: Any) -> AbstractContextManager[object]:
        """Route this thread's allocations into `memory` (capability ALLOCATE_IN_POOL); a graph that
        is captured keeps the memory alive."""
        return nullcontext()

    def owns(self, memory: Any, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lives in `memory`, so that replays overwrite it. False is always safe:
        core keeps strong references then, and copies what eager parts return."""
        return False

    def weak_ref(self, memory: Any, tensor: torch.Tensor) -> torch.Tensor:
        """An alias of a tensor that `owns` is true of; its block may be used again."""
        raise MissingCapabilityError(f"platform {self.name!r} has no weak references")

    def memory_bytes(self, memory: Any) -> int | None:
        """Bytes that `memory` holds from the device, or None if that cannot be told."""
        return None

    def driver_bytes(self) -> int | None:
        """Device memory in use that the tensor allocator does not hold, which is where executable
        graphs live, or None. Asked for around every capture, so it must be cheap."""
        return None

    def allocations(self) -> int | None:
        """How many blocks of memory of the current device are given away; None where that cannot be
        told. What a capture leaves somewhere in Python is found so."""
        return None

    def make_room(self) -> None:
        """Give memory that an allocator keeps unused back to the device where less than that is
        free: inside of a capture it cannot, and a warm-up may just have used as much. Called before
        each capture of a runner, under the capture lock."""
        return None

    def release_memory(self, memory: Any) -> None:
        """Give `memory` back to the device; all its graphs are reset already. Called under the
        capture lock, because an allocator must not return memory while another capture is open."""
        return None

    def save(self, memory: Any) -> Any:
        """What `restore` needs once the pages of `memory` were taken away and given back: copies on
        the host of the blocks in use. Called under the capture lock, on an idle device."""
        raise MissingCapabilityError(f"platform {self.name!r} cannot save graph memory")

    def restore(self, memory: Any, saved: Any) -> bool:
        """Write back what `save` returned. False if memory is not at all addresses of `memory`,
        which is lost then; nothing is written. May be called again."""
        raise MissingCapabilityError(f"platform {self.name!r} cannot save graph memory")

    def pointers(self, graph: Any) -> GraphPointers | None:
        """The words that the nodes of a captured `graph` hold and that may be addresses, or None if
        that cannot be told: a word too many is harmless, a missing one is a read that nobody knows
        of. Asked for after a capture; it must not wait for the device."""
        return None

    def memory_blocks(self) -> Sequence[MemoryBlock] | None:
        """Every block that torch's allocator has given away on devices of this kind, or None if
        that cannot be told. Asked for together with `pointers`."""
        return None

    # Streams ---------------------------------------------------------------------------------

    def new_stream(self) -> Any:
        """A stream to capture on; None where the device has no streams."""
        return None

    def adopt_stream(self, stream: Any) -> Any:
        """A stream of the host's to capture on; raises `InvalidOptionError` for one that cannot
        be."""
        raise MissingCapabilityError(f"platform {self.name!r} has no streams to capture on")

    def capture_stream(self, stream: Any, work: GraphWork | None) -> Any:
        """The stream to capture on: `stream`, of `new_stream`, or one that suits better what the
        warm-up issued, which is None where nobody counted it."""
        return stream

    def on_stream(self, stream: Any) -> AbstractContextManager[object]:
        """Make `stream` current; it waits for the caller's stream, which waits for it at exit."""
        return nullcontext()

    def current_stream_id(self) -> int:
        """An integer that tells two streams apart."""
        return 0

    def stream_id_reader(self) -> Callable[[], int]:
        """A function that returns the current stream's id on the device that is current now.

        It is called at every replay, so a platform returns the cheapest function it has.
        """
        return self.current_stream_id

    def current_stream(self) -> Any:
        """The current stream itself; asked for only when its id has changed."""
        return None

    def order_after(self, stream: Any) -> None:
        """Make the current stream wait, without the host, for what `stream` was given so far."""
        return None

    def synchronize(self) -> None:
        """Wait on the host until the device is idle."""
        return None

    def new_event(self) -> DeviceEvent | None:
        """An event; None where copies from `host_buffer` are over when they return."""
        return None

    def float32_precision(self, use: str) -> str:
        """To what float32 operators round their operands under the present settings: "ieee" is
        float32 itself, others are "tf32" and "bf16". `use` is "matmul", "convolution" or "rnn"."""
        return "ieee"

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Host memory, uint8 [nbytes], from which a step's inputs are copied to the device:
        page-locked where the platform has events, so that the host need not wait."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def new_input_transport(self, slab: Any, in_graph: bool = True) -> Any:
        """An input transport (graphrt/core/inputs/transport.py) that moves a runner's inputs into
        `slab` in a way of the device's own; only with `in_graph` may graphs fetch them. None is for
        the staged copy, which moves them before each launch. The interface is graphrt's own: it may
        change."""
        return None

    # Figures and errors - -----------------------------------------------------------------

    def memory_figures(self) -> MemoryFigures | None:
        """Free and total device memory, or None."""
        return None

    def default_max_size(self) -> int:
        """The largest capture size, in tokens, that is worth it by default."""
        return 512

    def stream_room(self) -> StreamRoom | None:
        """The streams that graphs may take now, and those that must stay free; None where graphs
        hold no streams, or the device does not tell. Where it does, core begins no capture that may
        take more, and the most valuable graphs are captured first. Asked around every capture."""
        return None

    def streams_needed(self, work: GraphWork) -> int:
        """The most streams that the graphs of such a forward will hold together, all that are
        taken in the middle of a capture included. Asked only where `stream_room` tells some."""
        return work.graphs

    def explain(self, error: BaseException) -> CaptureError:
        """The cause of a failed capture, with the offending operator and advice where known.

        Where this default is returned, for an error that no device can have raised, core raises
        the forward's own exception as it is.
        """
        if isinstance(error, CaptureError):
            return error
        unknown = Unexplained.of(error)
        if self.capture_executes or type(error) is not RuntimeError:
            return unknown
        return CaptureError(unknown.what, advice=unknown.advice)

    # Tasks -----------------------------------------------------------------------------------

    def task_begin(self, graph: Any) -> None:
        """Start bracketing the operators of one updatable task in the open capture of `graph`."""
        raise MissingCapabilityError(f"platform {self.name!r} cannot update tasks")

    def task_end(self, graph: Any) -> Any:
        """Close the bracket; returns the handle that updates name."""
        raise MissingCapabilityError(f"platform {self.name!r} cannot update tasks")

    def replay_updated(
        self, graph: Any, updates: Sequence[TaskUpdate], *, changed: bool, name: str = ""
    ) -> None:
        """Replay `graph`, which errors call `name`, with every task issued anew, in the order that
        the device needs. `updates` names all tasks of the graph. With `changed` false their
        arguments are those of the replay before, and only what the device needs at every replay is
        done. If an `issue` raises, nothing runs, or all that runs comes to its end, with some
        arguments new and some old; the next replay comes with `changed` true.
        """
        raise MissingCapabilityError(f"platform {self.name!r} cannot update tasks")


# Which of several devices is meant, and what may not happen on two at once ------------------------

# Process-wide because devices are: two captures on one device at the same time see each other's
# work, whoever they belong to.
_locks: dict[tuple[str, int | None], threading.RLock] = {}


def capture_lock(device: torch.device) -> threading.RLock:
    """The lock of a device that is held by the thread that captures on it."""
    return _locks.setdefault((device.type, device.index), threading.RLock())


@contextmanager
def no_other_capture(device: torch.device) -> Iterator[bool]:
    """Keep other devices of this kind from being captured on, if none is: else it yields False.

    The caller holds the lock of `device`. It does not wait: who captures there may wait for it.
    """
    # A copy of the items: another thread may add a device's.
    others = [lock for key, lock in list(_locks.items()) if key[0] == device.type]
    with ExitStack() as taken:
        yield all(lock.acquire(blocking=False) and taken.callback(lock.release) for lock in others)


def device_of(platform: Platform, device: torch.device | str | int | None) -> torch.device:
    """The device that is meant, with its index where there may be several: None is the current one.

    Raises `InvalidOptionError` for one of another kind, and for an index that there is not.
    """
    kind = platform.device_type
    asked = asked_device(kind, device)
    current, count = platform.current_device(), platform.device_count()
    index = current or 0 if asked.index is None else asked.index
    if asked.type != kind:
        raise _no_device("the device is of another kind than the platform's", asked, kind)
    if not 0 <= index < count:
        raise _no_device(f"there is no device of that index, but {count}", asked, kind)
    return torch.device(kind) if current is None else torch.device(kind, index)


def asked_device(kind: str, device: Any) -> torch.device:
    """The device that an argument names, or one of `kind`; raises `InvalidOptionError` where it
    names none."""
    try:
        if isinstance(device, int | None):
            return torch.device(kind) if device is None else torch.device(kind, device)
        return torch.device(device)
    # No index, or no name of a device.
    except (RuntimeError, ValueError, OverflowError, TypeError) as error:
        raise _no_device("the argument 'device' names no device", shown(device), kind) from error


def check_exists(device: torch.device, kind: str) -> None:
    """Raise `InvalidOptionError` if torch has no such device; `kind` is that of the platform."""
    try:
        torch.empty(0, dtype=torch.uint8, device=device)
    # A torch that was built without a device asserts.
    except (AssertionError, RuntimeError) as error:
        raise _no_device(f"torch has no such device here ({error})", device, kind) from error


def _no_device(what: str, got: object, kind: str) -> InvalidOptionError:
    return InvalidOptionError(
        what,
        got=got,
        expected=f"a torch.device, its name or an index of a device of type {kind!r}",
        advice="leave device= out for the current one, or name the platform of that device",
    )
