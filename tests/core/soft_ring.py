"""The input ring in software, as the contract says it, and the CPU as a device with one."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from graphrt.cpu import CpuPlatform
from graphrt.cpu.graph import TapeGraph
from graphrt.cuda.ring.format import RingFormat, slot_bytes
from graphrt.cuda.ring.transport import RingTransport, ring_transport


class SoftRing:
    """A ring whose fetches copy with `ctypes`, at once, or when `lag` is set, as `run` says."""

    def __init__(self, slab: torch.Tensor, slots: int, nbytes: int, moves: int) -> None:
        self.slots = slots
        self.payload, self.stride = slot_bytes(nbytes, moves)
        size = RingFormat.CONTROL_BYTES + slots * self.stride
        self.memory = torch.zeros(size, dtype=torch.uint8)
        self.device_memory = ()
        self.slab = slab
        self.lag = False
        self.queue: deque[Callable[[], None]] = deque()
        self.launches = 0
        self.waited = 0
        self.on_launch: Callable[[Callable[[], None]], bool] = lambda fetch: False
        self.counter = ctypes.c_uint64(0)

    def prepare(self, nbytes: int, moves: int) -> Callable[[], None]:
        def fetch() -> None:
            self.fetch(nbytes, moves)

        def launch() -> None:
            self.launches += 1
            if not self.on_launch(fetch):
                self.enqueue(fetch)

        return launch

    def enqueue(self, work: Callable[[], None]) -> None:
        """Work of the device: done in its order, at once unless it lags."""
        self.queue.append(work)
        if not self.lag:
            self.run()

    def run(self, most: int = -1) -> None:
        while self.queue and most:
            self.queue.popleft()()
            most -= 1

    def wait(self) -> None:
        self.waited += 1
        self.run()

    def fetch(self, nbytes: int, most: int) -> None:
        control = self.memory.data_ptr()
        words = (ctypes.c_uint64 * (RingFormat.CONTROL_BYTES // 8)).from_address(control)
        step = self.counter.value
        start = control + RingFormat.CONTROL_BYTES + step % self.slots * self.stride
        slot = ctypes.c_uint64 * (RingFormat.FIRST_MOVE + RingFormat.MOVE_WORDS * most)
        read = list(slot.from_address(start))
        if read[RingFormat.NUMBER] != step:
            words[RingFormat.FOUND] = read[RingFormat.NUMBER]
            words[RingFormat.FAULT] = step + 1
            return
        payload, slab = start + self.payload, self.slab.data_ptr()
        count = read[RingFormat.COUNT]
        if count & RingFormat.WHOLE:
            count -= RingFormat.WHOLE
            ctypes.memmove(slab, payload, -(-nbytes // 16) * 16)
        assert count <= most
        for number in range(count):
            at = RingFormat.FIRST_MOVE + number * RingFormat.MOVE_WORDS
            move = read[at : at + RingFormat.MOVE_WORDS]
            assert not read[RingFormat.COUNT] & RingFormat.WHOLE or move[3] == RingFormat.FILL
            _move(slab, payload, *move)
        self.counter.value = step + 1
        words[RingFormat.PROGRESS] = step + 1


def _move(slab: int, payload: int, to: int, source: int, size: int, how: int) -> None:
    kind, period = how & 255, how >> 8
    into = (ctypes.c_ubyte * size).from_address(slab + to)
    if kind == RingFormat.FILL:
        pattern = source.to_bytes(8, "little")
        into[:] = [pattern[(slab + to + place) & 7] for place in range(size)]
        return
    start = source + (payload if kind == RingFormat.PAYLOAD else 0)
    rows = bytes((ctypes.c_ubyte * min(period, size)).from_address(start))
    into[:] = (rows * (-(-size // len(rows))))[:size]


class RingGraph(TapeGraph):
    """A tape with what fetches its inputs in front."""

    def __init__(self) -> None:
        super().__init__()
        self.fetches: list[Callable[[], None]] = []

    def replay(self) -> None:
        for fetch in self.fetches:
            fetch()
        super().replay()

    def reset(self) -> None:
        self.fetches.clear()
        super().reset()


class RingPlatform(CpuPlatform):
    """The CPU, which fetches inputs as a device would: in a graph, if it is captured."""

    fetched_bytes = 64 << 10

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rings: list[SoftRing] = []
        self._open: RingGraph | None = None

    def new_input_transport(self, slab: Any, in_graph: bool = True) -> RingTransport | None:
        if not in_graph:
            return None
        return ring_transport(
            self, slab, self.new_ring, most_bytes=self.fetched_bytes, limit_s=None
        )

    def new_ring(self, slab: torch.Tensor, slots: int, nbytes: int, moves: int) -> SoftRing:
        ring = SoftRing(slab, slots, nbytes, moves)
        ring.on_launch = self._captured
        self.rings.append(ring)
        return ring

    def new_graph(self) -> RingGraph:
        return RingGraph()

    def begin_capture(self, graph: Any, memory: Any) -> None:
        super().begin_capture(graph, memory)
        self._open = graph

    def end_capture(self, graph: Any) -> bool:
        self._open = None
        return super().end_capture(graph)

    def abort_capture(self, graph: Any) -> None:
        self._open = None
        super().abort_capture(graph)

    def _captured(self, fetch: Callable[[], None]) -> bool:
        if self._open is None:
            return False
        self._open.fetches.append(fetch)
        fetch()  # captures execute here
        return True
