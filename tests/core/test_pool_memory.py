"""Which allocator segments belong to a pool; read again only after the allocator has changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphrt.platforms import Allocator, PoolHandle, PoolMemory


class Memory:
    """Segments of an allocator, by hand."""

    def __init__(self) -> None:
        self.segments: list[Mapping[str, Any]] = []
        self.handles = self.changes = self.looks = 0
        self.calls: list[str] = []
        self.memory = PoolMemory(
            Allocator(
                current_device=lambda: 0,
                new_handle=self._new_handle,
                empty_cache=lambda: None,
                stats=self._stats,
                snapshot=self._snapshot,
                route_thread=self._called("route_thread"),
                stop_routing=self._called("stop_routing"),
                release_share=self._called("release_share"),
                hold=lambda device, handle: None,
            )
        )

    def has(self, *segments: tuple[int, int, tuple[int, int]], device: int = 0) -> None:
        """From now on there are these segments: from an address on, so many bytes, of a pool."""
        self.changes += 1
        self.segments = [
            {"address": at, "total_size": size, "segment_pool_id": pool, "device": device}
            for at, size, pool in segments
        ]

    def _called(self, name: str) -> Callable[[int, PoolHandle], object]:
        return lambda device, handle: self.calls.append(f"{name} {device} {handle[1]}")

    def _new_handle(self) -> tuple[int, int]:
        self.handles += 1
        return (0, self.handles)

    def _stats(self, device: int) -> Mapping[str, Any]:
        return {"reserved_bytes": {"all": {"allocated": self.changes, "freed": 0}}}

    def _snapshot(self) -> Sequence[Mapping[str, Any]]:
        self.looks += 1
        return self.segments


def test_a_pool_owns_the_segments_of_its_handle_on_its_device():
    device = Memory()
    memory, handle = device.memory, device.memory.handle()
    device.has((100, 50, handle), (300, 50, (0, 99)))
    assert [memory.owns(at) for at in (99, 100, 149, 150, 300)] == [0, 1, 1, 0, 0]
    assert (memory.bytes(), device.looks) == (50, 1)
    device.has((100, 50, handle), device=1)
    assert memory.bytes() == 0


def test_segments_of_a_previous_pool_handle_stay_owned_until_freed():
    device = Memory()
    memory, first = device.memory, device.memory.handle()
    device.has((100, 50, first))
    assert memory.owns(100)
    # No graph holds the first one any more.
    second = memory.handle()
    assert second != first
    device.has((100, 50, first), (200, 50, second))
    assert memory.owns(100) and memory.owns(200)
    device.has((200, 50, second))
    assert memory.bytes() == 50
    # Of a pool that was given the same numbers.
    device.has((100, 50, first), (200, 50, second))
    assert memory.bytes() == 50 and not memory.owns(100)


def test_allocating_routes_a_threads_allocations_to_the_pool_until_exit():
    device = Memory()
    routing = device.memory.allocating()
    assert device.calls == []
    with routing:
        assert device.calls == ["route_thread 0 1"]
    over = ["route_thread 0 1", "stop_routing 0 1", "release_share 0 1"]
    assert device.calls == over
    # Once more, as an interrupt may.
    routing.__exit__(None, None, None)
    assert device.calls == over


def test_a_miss_asks_the_allocator_once_after_each_capture():
    device = Memory()
    memory, handle = device.memory, device.memory.handle()
    asked = 0

    def stats(index: int) -> Mapping[str, Any]:
        nonlocal asked
        asked += 1
        return device._stats(index)

    memory._allocator = replace(memory._allocator, stats=stats)
    device.has((100, 50, handle))
    assert [memory.owns(at, grows=False) for at in (7, 8, 120, 9)] == [0, 0, 1, 0]
    assert asked == 1
    # While a capture may be under way, segments may come at any time.
    assert not memory.owns(200) and asked == 2
    device.has((100, 50, handle), (200, 50, handle))
    assert memory.owns(200)
    # And while the pool's memory is allocated by hand.
    with memory.allocating():
        asked = 0
        assert not memory.owns(400, grows=False) and not memory.owns(400, grows=False)
        assert asked == 2
    memory.handle()
    device.has((100, 50, memory.handle()), (400, 50, memory.handle()))
    assert memory.owns(400, grows=False)
