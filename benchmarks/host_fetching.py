"""What a step whose graph fetches its inputs costs the host in Python, without a device.

    python3 -m benchmarks.host_fetching [--json FILE]

A CPU platform with an input ring that nobody reads, and graphs whose replay does nothing: what is
left of `runner(...)` is its own path. Whole calls with five inputs on the host, of a captured size
and padded, and by slot, above what the bare replay and the bare memmoves of the same bytes cost.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import median_us
from graphrt import Batch, GraphOptions, GraphRunner, InputSpec
from graphrt.cpu import CpuPlatform
from graphrt.cpu.graph import TapeGraph
from graphrt.cuda.ring.format import RingFormat, slot_bytes
from graphrt.cuda.ring.transport import RingTransport, ring_transport

SIZE, LIVE = 64, 61
ROUNDS, CALLS = 101, 200
SPECS = {
    "input_ids": InputSpec(torch.int64, ("tokens",)),
    "positions": InputSpec(torch.int64, ("tokens",)),
    "slot_mapping": InputSpec(torch.int32, ("tokens",), pad=-1, index=True),
    "block_table": InputSpec(torch.int32, ("reqs", 64), pad=0, index=True),
    "query_start_loc": InputSpec(torch.int32, ("reqs+1",), pad="repeat"),
}
_AHEAD = 1 << 29
"""Steps that the device has always done already, so that no step waits for a slot."""


class UnreadRing:
    """A ring of which nobody fetches anything but the first slot."""

    def __init__(self, slots: int, nbytes: int, moves: int) -> None:
        self.slots = slots
        self.payload, self.stride = slot_bytes(nbytes, moves)
        size = RingFormat.CONTROL_BYTES + slots * self.stride
        self.memory = torch.zeros(size, dtype=torch.uint8)
        self.device_memory: tuple[torch.Tensor, ...] = ()
        self._progress = self.memory.view(torch.int64)[RingFormat.PROGRESS :]

    def prepare(self, nbytes: int, moves: int) -> Callable[[], None]:
        def fetch() -> None:
            self._progress[0] = 1

        return fetch

    def wait(self) -> None: ...

    def run_ahead(self) -> None:
        self._progress[0] = _AHEAD


class NullGraph(TapeGraph):
    """A graph that is captured, and then replays nothing, from C."""

    def silence(self) -> None:
        self.replay = int  # type: ignore[assignment]


class NullPlatform(CpuPlatform):
    """The CPU as a device with a ring, and with streams of which there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[NullGraph] = []
        self.rings: list[UnreadRing] = []

    def new_graph(self) -> NullGraph:
        self.graphs.append(NullGraph())
        return self.graphs[-1]

    def new_input_transport(self, slab: Any, in_graph: bool = True) -> RingTransport | None:
        if not in_graph:
            return None
        return ring_transport(self, slab, self.new_ring, most_bytes=64 << 10, limit_s=None)

    def new_ring(self, slab: torch.Tensor, slots: int, nbytes: int, moves: int) -> UnreadRing:
        self.rings.append(UnreadRing(slots, nbytes, moves))
        return self.rings[-1]


def values(rows: int) -> dict[str, torch.Tensor]:
    """The inputs of a decode step."""
    found = {
        name: torch.zeros(*spec.sizes(rows, rows), dtype=spec.dtype) for name, spec in SPECS.items()
    }
    found["query_start_loc"] = torch.arange(rows + 1, dtype=torch.int32)
    return found


def fetching_runner() -> GraphRunner:
    """A captured runner of null graphs."""
    platform = NullPlatform()
    runner = GraphRunner(
        lambda input_ids, **_: input_ids + 1,
        inputs=SPECS,
        outputs=("tokens",),
        mode="FULL_DECODE_ONLY",
        sizes=[1, 2, 4, *range(8, 129, 8)],
        max_num_reqs=128,
        platform=platform,
        options=GraphOptions(inputs_in_graph=True),
    )
    runner.capture()
    # The first steps are tried, so by graphs that compute.
    for rows in (SIZE, LIVE) * 2:
        for _ in range(2):
            runner(Batch(rows, rows, 1), **values(rows))
    for graph in platform.graphs:
        graph.silence()
    for ring in platform.rings:
        ring.run_ahead()
    return runner


def memmoves(given: dict[str, torch.Tensor]) -> Callable[[], None]:
    """The bytes of a step's inputs, moved one after the other."""
    into = torch.empty(1 << 20, dtype=torch.uint8)
    moves, at = [], into.data_ptr()
    for value in given.values():
        moves.append((at, value.data_ptr(), value.nbytes))
        at += -(-value.nbytes // 256) * 256
    memmove = ctypes.memmove

    def move() -> None:
        for to, start, size in moves:
            memmove(to, start, size)

    move.kept = into, given  # type: ignore[attr-defined]
    return move


def call(runner: GraphRunner, rows: int, given: dict[str, torch.Tensor]) -> Any:
    return runner(Batch(rows, rows, 1), **given)


def by_slot(runner: GraphRunner, rows: int) -> Any:
    return runner(runner.slot(Batch(rows, rows, 1)))


def figures(runner: GraphRunner, rounds: int = ROUNDS) -> dict[str, float]:
    """Microseconds of whole calls above the bare replay and, by value, the bare memmoves."""
    replay = runner.pool.platform.graphs[0].replay
    rows = {"at a captured size": SIZE, "padded": LIVE}
    steps: list[Callable[[], Any]] = [replay]
    for live in rows.values():
        given = values(live)
        steps += [memmoves(given), partial(call, runner, live, given)]
        steps.append(partial(by_slot, runner, live))
    nothing, bare, *times = median_us(lambda: None, *steps, rounds=rounds, calls=CALLS, warm_ups=1)
    found = {"bare replay": bare - nothing}
    for place, kind in enumerate(rows):
        moved, called, slot = times[3 * place : 3 * place + 3]
        found[f"5 memmoves, {kind}"] = moved - nothing
        found[f"call, 5 host inputs, {kind}"] = called - bare - (moved - nothing)
        found[f"slot and its step, {kind}"] = slot - bare
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with fetching_runner() as runner:
        found = figures(runner, options.rounds)
    for name, value in found.items():
        print(f"{name:<40}{value:9.3f} us")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
