"""A device that exists only as what `torch.accelerator` would say of it, with the CPU inside.

It is as strict as real ones: a pool whose last graph was reset may not be entered again, a capture
ends on the stream it began on, and a stream that waits for one under capture is drawn into it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from graphrt.cpu import Arena, TapeGraph


class StubStream:
    def __init__(self, device: StubDevice, stream_id: int | None = None) -> None:
        self._device = device
        self.stream_id = next(device.stream_ids) if stream_id is None else stream_id
        self.recording = False
        self.drawn_into: StubStream | None = None

    def is_capturing(self) -> bool:
        return self.recording or self.drawn_into is not None

    def wait_stream(self, other: StubStream) -> None:
        self._device.waits.append((self.stream_id, other.stream_id))
        if other.drawn_into is self:
            other.drawn_into = None
        elif other.is_capturing():
            self.drawn_into = other


class StubGraph:
    """Replays a tape of the CPU, whose arena stands for the allocator pool.

    A capture on a device executes nothing, and a tape cannot do without: so that every operator
    has its effect once, the first replay after a capture counts as what the capture did.
    """

    def __init__(
        self, device: StubDevice, keep_graph: bool = False, *, pool: tuple[int, int] | None = None
    ) -> None:
        if device.no_graphs is not None:
            raise RuntimeError(device.no_graphs)
        self.graph_pool = pool
        self._device = device
        self._tape = TapeGraph()
        self._stream: StubStream | None = None
        self._pool: tuple[int, int] | None = None
        self._captured = self._executed = False

    def capture_begin(self) -> None:
        device = self._device
        if device.fail_begin:
            raise RuntimeError("the capture cannot begin")
        self._stream = device.current_stream()
        if self._stream.is_capturing():
            raise RuntimeError("this stream is being captured")
        self._pool = self.graph_pool or device.new_pool()
        assert self._pool not in device.dead_pools, "the allocator has freed this pool"
        self._stream.recording = True
        self._tape.capture_begin(device.arenas[self._pool])

    def capture_end(self) -> None:
        if self._stream is None or self._captured:
            self._device.crashes += 1  # XPU reads a graph that is not there
            raise RuntimeError("no capture is open")
        if self._device.current_stream() is not self._stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        if self._device.fail_end:
            self._tape.capture_abort()
            raise RuntimeError("the capture was invalidated")
        self._stream.recording = False
        try:
            self._tape.capture_end()
        except BaseException:
            self._tape.capture_abort()
            raise
        assert self._pool is not None
        self._device.users[self._pool] = self._device.users.get(self._pool, 0) + 1
        self._captured, self._executed = True, False

    def replay(self) -> None:
        if not self._captured:
            raise RuntimeError("nothing was captured")
        if self._executed:
            self._tape.replay()
        self._executed = True

    def reset(self) -> None:
        self._device.resets.append(self)
        if self._captured:
            assert self._pool is not None
            self._captured = False
            self._device.users[self._pool] -= 1
            if not self._device.users[self._pool]:
                self._device.dead_pools.add(self._pool)
        self._tape.reset()

    def pool(self) -> tuple[int, int]:
        if not self._captured:
            raise RuntimeError("Called pool() without a preceding successful capture.")
        assert self._pool is not None
        return self._pool


class StubDevice:
    """The state of the device, and what a test can make it do."""

    def __init__(self) -> None:
        self.kind: str | None = "cpu"
        self.available = True
        self.no_graphs: str | None = None
        self.fail_begin = False
        self.fail_end = False
        self.memory_info: tuple[int, int] | None = (3, 4)
        self.tells_pools = False
        self.arenas: dict[tuple[int, int], Arena] = {}
        self.users: dict[tuple[int, int], int] = {}
        self.dead_pools: set[tuple[int, int]] = set()
        self.waits: list[tuple[int, int]] = []
        self.resets: list[StubGraph] = []
        self.emptied = 0
        self.crashes = 0
        self.snapshots = 0
        self.stream_ids = itertools.count(1)
        self._pool_ids = itertools.count(1)
        self._default_stream = StubStream(self, 0)
        self._thread = threading.local()

    # What torch.accelerator asks ---------------------------------------------------------------

    def current_accelerator(self) -> torch.device | None:
        return None if self.kind is None else torch.device(self.kind)

    def current_stream(self, device: int | None = None) -> StubStream:
        stream: StubStream = getattr(self._thread, "stream", self._default_stream)
        return stream

    def set_stream(self, stream: StubStream) -> None:
        self._thread.stream = stream

    def get_memory_info(self) -> tuple[int, int]:
        if self.memory_info is None:
            raise RuntimeError("the allocator of this device does not tell")
        return self.memory_info

    def memory_stats(self, device: int | None = None) -> Mapping[str, int]:
        held = sum(arena.reserved_bytes for arena in self.arenas.values())
        return {"reserved_bytes.all.allocated": held, "reserved_bytes.all.freed": 0}

    def empty_cache(self) -> None:
        self.emptied += 1

    # What its module offers --------------------------------------------------------------------

    def memory_snapshot(self) -> Sequence[Mapping[str, Any]]:
        if not self.tells_pools:
            raise AttributeError("memory_snapshot")
        self.snapshots += 1
        everything = {
            "address": 0,
            "total_size": 1 << 63,
            "device": 0,
            "segment_pool_id": (0, 0),
        }
        chunks = [
            {
                "address": chunk.base,
                "total_size": chunk.nbytes,
                "device": 0,
                "segment_pool_id": pool,
            }
            for pool, arena in self.arenas.items()
            for chunk in arena._chunks
        ]
        return [everything, *chunks]

    # -------------------------------------------------------------------------------------------

    def new_pool(self) -> tuple[int, int]:
        pool = (next(self._pool_ids), 0)
        self.arenas[pool] = Arena()
        return pool

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let torch take this for the accelerator."""

        def graph(keep_graph: bool = False, *, pool: tuple[int, int] | None = None) -> StubGraph:
            return StubGraph(self, keep_graph, pool=pool)

        accelerator = {
            "Graph": graph,
            "current_accelerator": self.current_accelerator,
            "is_available": lambda: self.available,
            "current_device_index": lambda: 0,
            "device_count": lambda: 1,
            "current_stream": self.current_stream,
            "set_stream": self.set_stream,
            "synchronize": lambda: None,
            "get_memory_info": self.get_memory_info,
            "memory_stats": self.memory_stats,
            "empty_cache": self.empty_cache,
        }
        for name, value in accelerator.items():
            monkeypatch.setattr(torch.accelerator, name, value, raising=False)
        monkeypatch.setattr(torch, "Stream", lambda: StubStream(self))
        monkeypatch.setattr(torch, "get_device_module", lambda kind: self)
