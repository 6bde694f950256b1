"""What inputs cost a step on the host, in microseconds, by where they are and how they get there.

    python3 -m benchmarks.gpu.inputs [--json FILE]

Whole `runner(...)` calls with five inputs of 35 kB, against the bare replay of the same graph of a
runner that is never stepped, and the five bare `memmove`s; and by size of the inputs, from where on
the copy engine is faster than a graph's own loads: the measure of `Platform.fetched_bytes` and of
`Platform.fetch_limit_s`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.common import arguments, environment, finish, median_us, show, synchronizer
from benchmarks.gpu.overhead import BARE, LIVE, SIZE, by_hand, call_runner
from benchmarks.host_overhead import decode_runner, values
from graphrt import Batch, GraphOptions, GraphRunner, InputSpec, get_platform

CALLS = 20
MEMMOVES = "5 memmoves"


def graph_of(runner: GraphRunner, size: int) -> Any:
    entries = runner.graphs.owners()[0].entries
    return next(entry.parts[0] for found, entry in entries.items() if found.num_tokens == size)


def memmoves(given: dict[str, torch.Tensor]) -> Callable[[], None]:
    """The bytes of a step's inputs, moved one after the other into pinned memory."""
    into = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
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


def write_slot(runner: GraphRunner, batch: Batch, given: dict[str, Any]) -> Any:
    """A step whose inputs are written where the graph fetches them, by numpy."""
    slot = runner.slot(batch)
    for name, place in slot.numpy.items():
        place[:] = given[name]
    return runner(slot)


def whole_calls(device: str, measure: Callable[..., list[float]]) -> dict[str, float]:
    """Host microseconds of whole calls, of the replay alone and of the memmoves alone."""
    options = {
        name: GraphOptions(inputs_in_graph=name == "fetched") for name in ("fetched", "staged")
    }
    runners = {name: decode_runner(device, options=each) for name, each in options.items()}
    bare = decode_runner(device)
    for runner in (*runners.values(), bare):
        runner.capture()
    graph = graph_of(bare, SIZE)
    bare_calls = decode_runner(device, options=options["staged"])
    bare_calls.capture()
    steps: dict[str, Callable[[], Any]] = {
        BARE: graph_of(bare_calls, SIZE).replay,
        f"{BARE}, with a fetch in it": graph.replay,
    }
    for rows, kind in ((SIZE, "at a captured size"), (LIVE, "padded")):
        on_host = values(rows)
        on_device = {name: value.to(device) for name, value in on_host.items()}
        batch = Batch(rows, rows, 1)
        steps[f"{MEMMOVES}, {kind}"] = memmoves(on_host)
        for name, runner in runners.items():
            for place, given in (("host", on_host), ("device", on_device)):
                steps[f"{name}, 5 {place} inputs, {kind}"] = partial(
                    call_runner, runner, rows, given
                )
            in_place = dict(runner.inputs.layout(SIZE, SIZE).views)
            if rows == SIZE:
                steps[f"{name}, 5 inputs in place, {kind}"] = partial(
                    call_runner, runner, rows, in_place
                )
        arrays = {name: value.numpy() for name, value in on_host.items()}
        fetched = runners["fetched"]
        steps[f"slot, written by numpy, {kind}"] = partial(write_slot, fetched, batch, arrays)
        steps[f"slot, nothing written, {kind}"] = partial(write_slot_of_nothing, fetched, batch)
        pinned = {
            name: value.pin_memory() if device == "cuda" else value
            for name, value in on_host.items()
        }
        steps[f"by hand, 5 host inputs, {kind}"] = by_hand(
            graph_of(bare_calls, SIZE), device, pinned
        )
    nothing, *times = measure(lambda: None, *steps.values())
    for runner in (*runners.values(), bare, bare_calls):
        runner.close()
    return {name: found - nothing for name, found in zip(steps, times, strict=True)}


def write_slot_of_nothing(runner: GraphRunner, batch: Batch) -> Any:
    return runner(runner.slot(batch))


def by_size(device: str) -> list[dict[str, float]]:
    """Of steps of one input, by its bytes: the host's and the device's microseconds, fetched and
    staged."""
    platform = get_platform(device)
    rows = []
    for shift in range(12, 24, 2):
        found: dict[str, float] = {"bytes": 1 << shift}
        for name in ("fetched", "staged"):
            before, platform.fetched_bytes = platform.fetched_bytes, 1 << 26
            limit, platform.fetch_limit_s = platform.fetch_limit_s, None
            try:
                runner = GraphRunner(
                    lambda x: x[:, :1] + 1,
                    inputs={"x": InputSpec(torch.uint8, ("tokens", 1 << shift))},
                    outputs=("tokens", 1),
                    mode="FULL",
                    sizes=[1],
                    max_num_reqs=1,
                    platform=platform,
                    options=GraphOptions(inputs_in_graph=name == "fetched", check="off"),
                )
            finally:
                platform.fetched_bytes, platform.fetch_limit_s = before, limit
            runner.capture()
            x = torch.zeros(1, 1 << shift, dtype=torch.uint8)
            found[f"{name}, device us"] = device_us(partial(runner, Batch(1, 1, 1), x=x))
            runner.close()
        rows.append(found)
    return rows


def device_us(step: Callable[[], Any], steps: int = 20, rounds: int = 9) -> float:
    """Microseconds of the device for a step, where the host is far enough ahead."""
    if not torch.cuda.is_available():
        return 0.0
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(40_000_000)
        begin.record()
        for _ in range(steps):
            step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / steps * 1e3)
    return sorted(times)[rounds // 2]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=151)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure = partial(
        median_us,
        rounds=options.rounds,
        calls=CALLS,
        warm_ups=1,
        synchronize=synchronizer(options.device),
    )
    calls = whole_calls(options.device, measure)
    rows: list[list[Any]] = []
    for name, value in calls.items():
        moved = calls[f"{MEMMOVES}, {'padded' if 'padded' in name else 'at a captured size'}"]
        above = value - calls[BARE]
        rows.append([name, value, above, above - moved if "host" in name else None])
    show("Whole steps", ["", "us", "above bare replay", "and the memmoves"], rows)
    sizes = by_size(options.device)
    show("By size", list(sizes[0]), [list(each.values()) for each in sizes])
    results = {"calls": calls, "by_size": sizes}
    finish("inputs", options, environment(options.device), results)


if __name__ == "__main__":
    main()
