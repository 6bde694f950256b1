"""Capture and replay on any device that registers graphs with torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from graphrt.accelerator.captures import AcceleratorCaptures, current
from graphrt.accelerator.library import (
    Snapshot,
    availability,
    device_type,
    memory_info,
    pool_snapshot,
)
from graphrt.accelerator.memory import GraphMemory
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.option_values import shown
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.device.contract import CONTRACT_VERSION, Capability, MemoryFigures
from graphrt.core.device.platform import Availability, Platform
from graphrt.core.device.pool_memory import weak_alias


class AcceleratorPlatform(Platform):
    """Graphs of `torch.accelerator.Graph`; all calls are about the current device.

    `availability()` finds the device: only after it `device_type` is the accelerator's, and
    `capabilities` has what depends on the device. SHARED_POOL is there if the device's own module
    tells which memory a pool has. Otherwise tensors are referenced strongly, and graphs share only
    the memory of tensors without references.
    """

    name = "accelerator"
    contract_version = CONTRACT_VERSION
    device_type = "cpu"
    capabilities = frozenset({Capability.CAPTURE, Capability.STREAMS})

    def __init__(self) -> None:
        self._captures = AcceleratorCaptures()
        self._snapshot: Snapshot | None = None
        self._availability = Availability(False)

    def availability(self) -> Availability:
        # Once found it is not asked again: asking runs work on the device, and each new pool would
        # do so, maybe while another thread captures.
        if not self._availability.available:
            self._availability = availability()
            if self._availability.available:
                self._set_device(device_type() or self.device_type)
        return self._availability

    def _set_device(self, device_type: str) -> None:
        self.device_type = device_type
        self._snapshot = pool_snapshot(device_type)
        self.capabilities = type(self).capabilities
        if self._snapshot is not None:
            self.capabilities |= {Capability.SHARED_POOL}

    def get_static_graph_wrapper_cls(self) -> str:
        return "graphrt.accelerator.AcceleratorGraphWrapper"

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__, "accelerator": self.device_type}

    # Several devices -------------------------------------------------------------------------

    def device_count(self) -> int:
        return torch.accelerator.device_count()

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def on_device(self, index: int | None) -> AbstractContextManager[object]:
        return torch.accelerator.device_index(index)

    # Graphs and their memory -----------------------------------------------------------------

    def new_memory(self) -> GraphMemory:
        return GraphMemory(self._snapshot)

    def new_graph(self) -> torch.accelerator.Graph:
        return torch.accelerator.Graph()

    def begin_capture(self, graph: Any, memory: GraphMemory) -> None:
        self._captures.begin(graph, memory)

    def end_capture(self, graph: Any) -> bool:
        return self._captures.end(graph)

    def abort_capture(self, graph: Any) -> None:
        self._captures.abort(graph)

    def owns(self, memory: GraphMemory, tensor: torch.Tensor) -> bool:
        # False is always safe: core then keeps a strong reference in place of a weak one, and
        # copies a result of an eager part that it could have read in place.
        device = tensor.device
        if device.type != self.device_type or device.index not in (None, memory.device):
            return False
        return memory.owns(tensor.untyped_storage().data_ptr())

    def weak_ref(self, memory: GraphMemory, tensor: torch.Tensor) -> torch.Tensor:
        return weak_alias(tensor)

    def memory_bytes(self, memory: GraphMemory) -> int | None:
        return memory.bytes()

    def release_memory(self, memory: GraphMemory) -> None:
        memory.clear()
        torch.accelerator.empty_cache()

    # Streams ---------------------------------------------------------------------------------

    def new_stream(self) -> torch.Stream:
        return self._captures.new_stream()

    def adopt_stream(self, stream: Any) -> torch.Stream:
        adopted: torch.Stream = stream
        if hasattr(stream, "stream_id") and not self._captures.is_lost(adopted):
            return adopted
        raise InvalidOptionError(
            "nothing can be captured on this stream",
            got=shown(stream),
            expected="a torch.Stream on which no capture failed half-way",
            advice="torch.Stream(device=...), made for this pool; or leave stream= out",
        )

    @contextmanager
    def on_stream(self, stream: torch.Stream) -> Iterator[None]:
        stream = self._captures.usable(stream)
        caller = torch.accelerator.current_stream()
        stream.wait_stream(caller)
        try:
            with current(stream):
                yield
        finally:
            # Waiting for a stream whose capture is still open would draw the caller's stream in.
            if not self._captures.is_lost(stream):
                caller.wait_stream(stream)

    def current_stream_id(self) -> int:
        return torch.accelerator.current_stream().stream_id

    def stream_id_reader(self) -> Callable[[], int]:
        read, device = torch.accelerator.current_stream, torch.accelerator.current_device_index()
        return lambda: read(device).stream_id

    def current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream()

    def order_after(self, stream: torch.Stream) -> None:
        torch.accelerator.current_stream().wait_stream(stream)

    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    # Figures ---------------------------------------------------------------------------------

    def memory_figures(self) -> MemoryFigures | None:
        figures = memory_info()
        return None if figures is None else MemoryFigures(*figures)


class AcceleratorGraphWrapper(GraphWrapper):
    """A `GraphWrapper` whose graphs are those of `torch.accelerator`."""

    platform_name = "accelerator"
