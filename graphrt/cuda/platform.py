"""NVIDIA GPUs: CUDA graphs, captured segment by segment.

Captures call `CUDAGraph.capture_begin` and `capture_end`: `torch.cuda.graph` would also collect
garbage, empty the cache and synchronise for every segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from graphrt.core.base.errors import CaptureError, InvalidOptionError
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.device.contract import (
    CONTRACT_VERSION,
    Capability,
    DeviceGraph,
    GraphPointers,
    MemoryBlock,
    MemoryFigures,
    TaskUpdate,
    UpdateFigures,
)
from graphrt.core.device.platform import Availability, Platform
from graphrt.core.device.pool_memory import PoolHandle, SavedMemory, pool_handle, weak_alias
from graphrt.core.inputs.transport import Slab
from graphrt.cuda._workspaces import mark_as_hosts
from graphrt.cuda.blocks import blocks_of, internal_sizes
from graphrt.cuda.captures import CudaCaptures, check_room, set_up_cublas
from graphrt.cuda.driver.api import driver_available, is_mapped, upload
from graphrt.cuda.driver.fetch import FetchRing
from graphrt.cuda.driver.pointers import pointers_of
from graphrt.cuda.explain import explain
from graphrt.cuda.memory import GraphMemory, empty_cache
from graphrt.cuda.private_torch import current_device, memory_stats, raw_stream_of
from graphrt.cuda.ring.transport import RingTransport, ring_transport
from graphrt.cuda.streams import own_stream
from graphrt.cuda.update.tasks import TaskHandle, Tasks


class CudaPlatform(Platform):
    """Graphs of `torch.cuda.CUDAGraph`; all calls are about the current device."""

    name = "cuda"
    contract_version = CONTRACT_VERSION
    device_type = "cuda"
    needs_pinned_copies = True
    raw_storages = True
    fetched_bytes = 64 << 10
    """The most input bytes of a step that its graph fetches by a kernel. Larger inputs are copied
    by the copy engine, which moves more bytes at once and costs more to start."""
    fetch_limit_s: float | None = 12e-6
    """How many seconds longer than an empty fetch a fetch may take: what a copy costs host and
    device (benchmarks/gpu/inputs.py). Measured when a ring is made. None: not measured."""
    # HIP has graphs and streams like CUDA; updates of tasks need the CUDA driver.
    capabilities = frozenset(
        {
            Capability.CAPTURE,
            Capability.SHARED_POOL,
            Capability.ALLOCATE_IN_POOL,
            Capability.STREAMS,
            Capability.RANDOM,
            Capability.HOST_POOL,
        }
        # Without the driver a failed capture abandons its pool.
        | (
            {Capability.TASK_UPDATE, Capability.FREE_FAILURES}
            if torch.version.hip is None
            else set()
        )
    )

    def __init__(self) -> None:
        self._tasks = Tasks()
        self._captures = CudaCaptures(self._tasks)

    def availability(self) -> Availability:
        if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            return Availability(False, f"torch {torch.__version__} was built without CUDA")
        # Unlike is_available(), device_count() asks NVML first, so the process may still be forked.
        if torch.cuda.device_count() == 0:
            return Availability(False, "no CUDA device is visible (driver, CUDA_VISIBLE_DEVICES)")
        return Availability(True)

    def get_static_graph_wrapper_cls(self) -> str:
        return "graphrt.cuda.CUDAGraphWrapper"

    def versions(self) -> dict[str, str]:
        if torch.version.hip is not None:
            return {"torch": torch.__version__, "hip": torch.version.hip}
        return {"torch": torch.__version__, "cuda": str(torch.version.cuda)}

    # Several devices -------------------------------------------------------------------------

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def current_device(self) -> int:
        return current_device()

    def on_device(self, index: int | None) -> AbstractContextManager[object]:
        return torch.cuda.device(index)

    # Graphs and their memory -----------------------------------------------------------------

    def new_memory(self) -> GraphMemory:
        return GraphMemory()

    def adopt_memory(self, handle: Any) -> GraphMemory:
        return GraphMemory(pool_handle(handle))

    def memory_handle(self, memory: GraphMemory) -> PoolHandle:
        return memory.shown()

    def new_graph(self) -> torch.cuda.CUDAGraph:
        check_room()
        set_up_cublas()
        # Updates of tasks name the nodes of the template, so torch has to keep it.
        return torch.cuda.CUDAGraph(keep_graph=driver_available())

    def update_figures(self, memory: GraphMemory) -> UpdateFigures | None:
        return replace(memory.updates) if memory.updates.tasks else None

    def begin_capture(self, graph: Any, memory: GraphMemory) -> None:
        self._captures.begin(graph, memory)

    def end_capture(self, graph: Any) -> bool:
        return self._captures.end(graph)

    @property
    def can_upload(self) -> bool:
        return driver_available()

    def upload(self, graph: Any) -> None:
        graph.instantiate()
        upload(graph.raw_cuda_graph_exec(), torch.cuda.current_stream().cuda_stream)

    def abort_capture(self, graph: Any) -> None:
        self._captures.abort(graph)

    def reset_graphs(self, graphs: Sequence[DeviceGraph]) -> None:
        homes = self._captures.homes_of(graphs)
        for home in homes:
            home.before_reset()
        # Not for the device: a host may have hours of other work on it.
        ended = self.new_event()
        ended.record()
        ended.synchronize()
        for graph in graphs:
            graph.reset()
        for home in homes:
            home.after_reset()

    def allocate_in(self, memory: GraphMemory) -> AbstractContextManager[object]:
        return memory.allocating()

    def owns(self, memory: GraphMemory, tensor: torch.Tensor) -> bool:
        if not tensor.is_cuda or tensor.get_device() != memory.device:
            return False
        address = tensor.untyped_storage().data_ptr()
        return memory.owns(address, grows=self._captures.is_any_open())

    def weak_ref(self, memory: GraphMemory, tensor: torch.Tensor) -> torch.Tensor:
        return weak_alias(tensor)

    def memory_bytes(self, memory: GraphMemory) -> int:
        return memory.bytes()

    def driver_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info()
        reserved = memory_stats(torch.cuda.current_device())["reserved_bytes"]["all"]
        return total - free - int(reserved["current"])

    def allocations(self) -> int:
        return int(memory_stats(current_device())["allocation"]["all"]["current"])

    def make_room(self) -> None:
        stats = memory_stats(current_device())
        reserved = int(stats["reserved_bytes"]["all"]["current"])
        unused = reserved - int(stats["allocated_bytes"]["all"]["current"])
        free, total = torch.cuda.mem_get_info()
        # A host may allow this process a part of the device only.
        allowed = int(total * torch.cuda.get_per_process_memory_fraction()) - reserved
        if unused > min(free, allowed):
            empty_cache()

    def release_memory(self, memory: GraphMemory) -> None:
        memory.clear()
        empty_cache()

    def save(self, memory: GraphMemory) -> SavedMemory:
        return memory.save(torch.device("cuda", memory.device), is_mapped)

    def restore(self, memory: GraphMemory, saved: SavedMemory) -> bool:
        return memory.restore(saved, is_mapped)

    def pointers(self, graph: Any) -> GraphPointers | None:
        if not driver_available():
            return None
        try:
            template = graph.raw_cuda_graph()
        except RuntimeError:  # it keeps no template, or has none
            return None
        return pointers_of(template)

    def memory_blocks(self) -> Sequence[MemoryBlock] | None:
        # No other allocator of torch lists its blocks.
        if torch.cuda.get_allocator_backend() != "native":
            return None
        snapshot = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return blocks_of(snapshot, internal_sizes())

    # Streams ---------------------------------------------------------------------------------

    def new_stream(self) -> torch.cuda.Stream:
        return own_stream()

    def adopt_stream(self, stream: Any) -> torch.cuda.Stream:
        device = torch.device("cuda", current_device())
        if not isinstance(stream, torch.cuda.Stream):
            got = repr(stream)
        elif stream.device != device:
            got = f"a stream of {stream.device}"
        elif stream == torch.cuda.default_stream():
            got = "the default stream, on which CUDA captures nothing"
        else:
            mark_as_hosts(stream)
            return stream
        raise InvalidOptionError(
            "nothing can be captured on this stream",
            got=got,
            expected=f"a torch.cuda.Stream of {device} that is not the default one",
            advice="give the stream that the host captures on",
        )

    @contextmanager
    def on_stream(self, stream: torch.cuda.Stream) -> Iterator[None]:
        caller = torch.cuda.current_stream()
        stream.wait_stream(caller)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            # An interrupt may come before the `with` sets the stream back.
            torch.cuda.set_stream(caller)
            caller.wait_stream(stream)

    def current_stream_id(self) -> int:
        return raw_stream_of(current_device())

    def stream_id_reader(self) -> Callable[[], int]:
        return partial(raw_stream_of, current_device())

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream()

    def order_after(self, stream: torch.cuda.Stream) -> None:
        torch.cuda.current_stream().wait_stream(stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def float32_precision(self, use: str) -> str:
        # Not `allow_tf32`: it raises once `fp32_precision` was set. That one follows both.
        cudnn: Any = torch.backends.cudnn
        owners = {"convolution": cudnn.conv, "rnn": cudnn.rnn}
        precision: str = owners.get(use, torch.backends.cuda.matmul).fp32_precision
        return precision

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")

    def new_input_transport(self, slab: Slab, in_graph: bool = True) -> RingTransport | None:
        # The CUDA driver loads the fetch kernel, which reads pinned memory at the host's address.
        if not in_graph or torch.version.hip is not None or not driver_available():
            return None
        # The first fetch is launched here: the driver refuses it beside another device's context.
        with torch.cuda.device(slab.buffer.device):
            return ring_transport(
                self, slab, FetchRing, most_bytes=self.fetched_bytes, limit_s=self.fetch_limit_s
            )

    # Figures, limits, errors -----------------------------------------------------------------

    def memory_figures(self) -> MemoryFigures:
        free, total = torch.cuda.mem_get_info()
        return MemoryFigures(free, total)

    def default_max_size(self) -> int:
        # Datacenter Blackwell gains from graphs up to larger batches.
        return 1024 if torch.cuda.get_device_capability()[0] == 10 else super().default_max_size()

    def explain(self, error: BaseException) -> CaptureError:
        return error if isinstance(error, CaptureError) else explain(error)

    # Tasks -----------------------------------------------------------------------------------

    def task_begin(self, graph: Any) -> None:
        self._tasks.begin(graph)

    def task_end(self, graph: Any) -> TaskHandle:
        return self._tasks.end(graph, self._captures.memory_of(graph).updates)

    def replay_updated(
        self, graph: Any, updates: Sequence[TaskUpdate], *, changed: bool, name: str = ""
    ) -> None:
        self._tasks.replay(graph, updates, changed)


class CUDAGraphWrapper(GraphWrapper):
    """A `GraphWrapper` whose graphs are CUDA graphs."""

    platform_name = "cuda"
