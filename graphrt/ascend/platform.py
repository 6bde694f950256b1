"""Ascend NPUs: ACL graphs captured with the raw begin and end, and tasks updated in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from typing import Any, cast

import torch

from graphrt.ascend.budget.streams import SCARCE_STREAMS, device_of, stream_room, streams_needed
from graphrt.ascend.captures import AclCaptures, event_class, graph_class, no_stream
from graphrt.ascend.driver.direct_stream import DirectStreams
from graphrt.ascend.driver.explain import explain
from graphrt.ascend.driver.launch_queue import checked_before, has_queue_ended, queue_ended
from graphrt.ascend.driver.library import (
    availability,
    available_streams,
    device_name,
    torch_npu,
    versions,
)
from graphrt.ascend.memory import GraphMemory
from graphrt.ascend.options import AscendOptions, update_order_of
from graphrt.ascend.private_torch import current_device, memory_stats, raw_stream_of, weak_ref
from graphrt.ascend.streams import OwnStreams, own_streams
from graphrt.ascend.update.brackets import TaskHandle
from graphrt.ascend.update.deferred import UpdateWindow
from graphrt.ascend.update.streams import is_update_stream, leave_stream, no_update_under_way
from graphrt.ascend.update.tasks import Tasks
from graphrt.ascend.waiting import DeferrableEntry, WaitingStep
from graphrt.ascend.watchdog import Watchdog
from graphrt.core.base.errors import (
    CaptureError,
    InvalidOptionError,
    MissingUpdateError,
    StreamBudgetError,
)
from graphrt.core.base.option_values import check_kind
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.device.contract import (
    CONTRACT_VERSION,
    Capability,
    GraphWork,
    MemoryFigures,
    StreamRoom,
    TaskUpdate,
)
from graphrt.core.device.platform import Availability, Platform, no_other_capture
from graphrt.core.device.pool_memory import PoolHandle, pool_handle
from graphrt.core.replay.tasks import Updates


class AscendPlatform(Platform):
    """Graphs of `torch.npu.NPUGraph`; all calls are about the current device."""

    name = "ascend"
    contract_version = CONTRACT_VERSION
    device_type = "npu"
    needs_pinned_copies = True
    capabilities = frozenset(
        {
            Capability.CAPTURE,
            Capability.SHARED_POOL,
            Capability.STREAMS,
            Capability.TASK_UPDATE,
            Capability.RANDOM,
            Capability.HOST_POOL,
        }
    )

    def __init__(self, options: AscendOptions | None = None) -> None:
        """Without `options` they come from the environment, when first used."""
        check_kind("options", options, AscendOptions)
        self._options = options

    @cached_property
    def options(self) -> AscendOptions:
        """How tasks are updated; raises `InvalidOptionError` for a bad variable."""
        return AscendOptions.from_environment() if self._options is None else self._options

    @cached_property
    def _npu(self) -> Any:
        return torch_npu().npu

    @cached_property
    def _streams(self) -> OwnStreams:
        return own_streams(self._npu)

    @cached_property
    def _direct_streams(self) -> DirectStreams:
        return DirectStreams(self._npu)

    @cached_property
    def _watchdog(self) -> Watchdog | None:
        options = self.options
        if options.hang_timeout_s is None:
            return None
        return Watchdog(
            self._npu,
            options.hang_timeout_s,
            options.on_hang,
            lambda: self._captures.is_any_open(),
        )

    @cached_property
    def _tasks(self) -> Tasks:
        return Tasks(
            self._npu,
            order=self.options.update_order or update_order_of(self._npu.get_device_name()),
            strategy=self.options.update_strategy,
            watchdog=self._watchdog,
            streams=self._streams.for_updates,
        )

    @cached_property
    def _captures(self) -> AclCaptures:
        return AclCaptures(self._npu, self._tasks)

    @cached_property
    def _graph_class(self) -> Any:
        return graph_class(self._npu)

    @cached_property
    def _event_class(self) -> Any:
        return event_class(self._npu)

    def availability(self) -> Availability:
        return availability()

    def get_static_graph_wrapper_cls(self) -> str:
        return "graphrt.ascend.ACLGraphWrapper"

    def versions(self) -> dict[str, str]:
        return versions()

    # Several devices -------------------------------------------------------------------------

    def device_count(self) -> int:
        return int(self._npu.device_count())

    def current_device(self) -> int:
        return int(self._npu.current_device())

    def on_device(self, index: int | None) -> AbstractContextManager[object]:
        device: AbstractContextManager[object] = self._npu.device(index)
        return device

    # Graphs and their memory -----------------------------------------------------------------

    def new_memory(self) -> GraphMemory:
        return GraphMemory(self._npu, self._streams, self._empty_cache)

    def adopt_memory(self, handle: Any) -> GraphMemory:
        return GraphMemory(self._npu, self._streams, self._empty_cache, pool_handle(handle))

    def memory_handle(self, memory: GraphMemory) -> PoolHandle:
        return memory.shown()

    def new_graph(self) -> Any:
        return self._graph_class()

    def begin_capture(self, graph: Any, memory: GraphMemory) -> None:
        self._captures.begin(graph, memory)

    def end_capture(self, graph: Any) -> bool:
        return self._captures.end(graph)

    def abort_capture(self, graph: Any) -> None:
        self._captures.abort(graph)

    def allocate_in(self, memory: GraphMemory) -> AbstractContextManager[object]:
        return memory.allocating()

    def owns(self, memory: GraphMemory, tensor: torch.Tensor) -> bool:
        if tensor.device.type != "npu" or tensor.device.index != memory.device:
            return False
        return memory.owns(tensor.untyped_storage().data_ptr())

    def weak_ref(self, memory: GraphMemory, tensor: torch.Tensor) -> torch.Tensor:
        return weak_ref(tensor)

    def memory_bytes(self, memory: GraphMemory) -> int:
        return memory.bytes()

    def driver_bytes(self) -> int:
        free, total = self._npu.mem_get_info()
        reserved = memory_stats(self._npu.current_device())["reserved_bytes"]["all"]
        return int(total - free - reserved["current"])

    def release_memory(self, memory: GraphMemory) -> None:
        memory.clear()
        self._empty_cache()

    def _empty_cache(self) -> None:
        """Call torch_npu's `empty_cache` while no update is under way. It waits for the device and
        holds the GIL: a thread that updates tasks could not go on, and the device waits for it."""
        device = torch.device("npu", self._npu.current_device())
        with no_other_capture(device) as alone, no_update_under_way():
            if alone:
                self._npu.empty_cache()

    # Streams ---------------------------------------------------------------------------------

    def new_stream(self) -> Any:
        try:
            stream = self._streams.lend()
            # Made now: once streams are few, none may be left for the direct one.
            if not self._direct_streams.make():
                return None
        except RuntimeError as error:
            # torch_npu makes 32 at once. Without them there are no graphs, and all runs eagerly.
            explained = self.explain(error)
            if isinstance(explained, StreamBudgetError):
                return None
            raise explained from error
        return stream

    def adopt_stream(self, stream: Any) -> Any:
        device = torch.device("npu", self._npu.current_device())
        if not isinstance(stream, self._npu.Stream):
            got = repr(stream)
        elif stream.device != device:
            got = f"a stream of {stream.device}"
        elif stream == self._npu.default_stream():
            got = "the default stream, on which CANN captures nothing"
        elif is_update_stream(stream):
            got = (
                "the stream on which tasks are updated: torch has a few, and hands them out in turn"
            )
        else:
            return stream
        raise InvalidOptionError(
            "nothing can be captured on this stream",
            got=got,
            expected=f"a torch.npu.Stream of {device} that is not the default one",
            advice="give the stream that the host captures on, or make another one",
        )

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        if stream is None:
            raise no_stream()
        caller = self._npu.current_stream()
        leave_stream(stream)
        if self._direct_streams.is_one(stream):
            caller.synchronize()
        stream.wait_stream(caller)
        try:
            with self._npu.stream(stream):
                yield
        finally:
            # An interrupt may come before the `with` sets the stream back.
            self._npu.set_stream(caller)
            caller.wait_stream(stream)

    def capture_stream(self, stream: Any, work: GraphWork | None) -> Any:
        # A direct stream waits for no side stream, and collectives have streams of their own.
        if stream is None or work is None or len(work.operators) > 1 or work.collectives:
            return stream
        free, direct = available_streams(), self._direct_streams.get()
        # With many free streams no capture runs out of them in its middle.
        if free is None or free >= SCARCE_STREAMS or direct is None:
            return stream
        # With "update_first" the first replay waits on this stream for the update stream. A direct
        # stream would not: an event still in the launch queue counts as passed there.
        return stream if work.tasks and self._tasks.update_first else direct

    def current_stream_id(self) -> int:
        return raw_stream_of()(current_device())

    def stream_id_reader(self) -> Callable[[], int]:
        # Every step calls this, so it also checks torch_npu's launch queue: once that has ended,
        # torch_npu drops all operators without an error.
        return checked_before(partial(raw_stream_of(), current_device()))

    def current_stream(self) -> Any:
        return self._npu.current_stream()

    def order_after(self, stream: Any) -> None:
        current = self._npu.current_stream()
        # Before anything is queued there, also the inputs of a step.
        leave_stream(current)
        current.wait_stream(stream)

    def synchronize(self) -> None:
        if self._watchdog is not None:
            self._watchdog.wait()
        self._npu.synchronize()

    def new_event(self) -> Any:
        return self._event_class()

    def float32_precision(self, use: str) -> str:
        # HF32 has as many bits as TF32; torch_npu lets convolutions use it unless told otherwise.
        owner = getattr(self._npu, "conv" if use == "convolution" else "matmul", None)
        return "tf32" if getattr(owner, "allow_hf32", False) else "ieee"

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        except RuntimeError:
            return super().host_buffer(nbytes)  # not pinned: copies are right, and the host waits

    # Figures, limits, errors -----------------------------------------------------------------

    def memory_figures(self) -> MemoryFigures:
        free, total = self._npu.mem_get_info()
        return MemoryFigures(free, total)

    def stream_room(self) -> StreamRoom | None:
        free = available_streams()
        return None if free is None else stream_room(free, self.options.reserve_streams)

    def streams_needed(self, work: GraphWork) -> int:
        return streams_needed(work, device_of(device_name()))

    def explain(self, error: BaseException) -> CaptureError:
        if isinstance(error, CaptureError):
            return error
        return queue_ended() if has_queue_ended(error) else explain(error)

    # Tasks -----------------------------------------------------------------------------------

    def task_begin(self, graph: Any) -> None:
        self._tasks.begin(graph)

    def task_end(self, graph: Any) -> TaskHandle:
        return self._tasks.end(graph)

    def replay_updated(
        self, graph: Any, updates: Sequence[TaskUpdate], *, changed: bool, name: str = ""
    ) -> None:
        self._tasks.replay(graph, updates, changed, name)

    def launch_deferred(self, graph: Any, updates: Sequence[TaskUpdate], *, name: str = "") -> bool:
        """Launch `graph`, whose tasks wait on the device until `update_deferred`.

        Returns True if that call must follow. False: `updating` has updated the tasks before.
        """
        return self._tasks.launch(graph, updates, name)

    def update_deferred(self, graph: Any, updates: Sequence[TaskUpdate], *, changed: bool) -> None:
        """Give the tasks of a launched graph their arguments, as `replay_updated` does. If an
        `issue` raises, the tasks are signalled all the same, so the device does not wait for
        ever."""
        self._tasks.update(graph, updates, changed)

    def updating(
        self, graph: Any, updates: Sequence[TaskUpdate]
    ) -> AbstractContextManager[UpdateWindow]:
        """Let the host update the tasks of `graph` itself: after `launch_deferred`, or before it.

        Inside, the pool's update stream is current, and waits for the last replay of the graph. The
        host issues every task on it and signals each with `UpdateWindow.signal`. If it raises, or
        leaves one out (`TaskContractError`), a launched graph ends with old arguments, and no
        signal is left for the next step.
        """
        return self._tasks.updating(graph, updates)

    def refuse_to_wait(self, device: torch.device) -> None:
        """Raise `MissingUpdateError` where a wait for `device` in this thread would never end, as
        the thread has launched a graph there whose update is to come."""
        self._tasks.refuse_to_wait(device)

    def forget_update(self, graph: Any, updates: Sequence[TaskUpdate]) -> None:
        """Take back an update of `updating` whose launch did not come: its signals would start the
        next step's tasks too early. End a launch whose update did not come, with old arguments."""
        self._tasks.forget(graph, updates)


class ACLGraphWrapper(GraphWrapper):
    """A `GraphWrapper` whose graphs are ACL graphs. Their updates may come after the launch."""

    platform_name = "ascend"
    platform_class = AscendPlatform
    entry_class = DeferrableEntry

    def destroy_graphs(self, descriptor: BatchDescriptor | None) -> None:
        """See `GraphWrapper.destroy_graphs`, which waits for the device: raises
        `MissingUpdateError`, and destroys nothing, where that would never end."""
        cast(AscendPlatform, self.pool.platform).refuse_to_wait(self.pool.device)
        super().destroy_graphs(descriptor)

    def update(self, updates: Updates) -> None:
        """Update the tasks of the step that was called with `DEFERRED`; raises `MissingUpdateError`
        if none was. Updates that do not fit leave it waiting. If one fails, it ends with some old
        arguments."""
        step = self.pool.owner
        launched = [
            each.waiting for each in self.entries.values() if isinstance(each, DeferrableEntry)
        ]
        if not isinstance(step, WaitingStep) or step not in launched:
            raise MissingUpdateError(
                "no step waits for updates",
                got=step,
                expected="a call with updates=DEFERRED before",
                advice="call the wrapper first, or pass the updates with the call",
            )
        step.end(self.pool, updates)
