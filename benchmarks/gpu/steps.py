"""Whole steps with the five inputs of a decode batch, by graphrt and without it."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.host_overhead import SPECS, TOO_LARGE, decode_runner, rows_of, values
from graphrt import Batch, GraphOptions, GraphRunner

SIZE, LIVE = 64, 61
BARE = "bare replay"
MEMMOVES = "5 memmoves"
COMPILED = 'torch.compile(mode="reduce-overhead")'


def by_hand(graph: Any, device: str, given: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Copies into static buffers, the padding rows, and the replay."""
    static = {name: value.to(device) for name, value in values(SIZE).items()}
    live = next(iter(given.values())).shape[0]
    tails = [
        (static[name][rows_of(name, live) :], live if spec.pad == "repeat" else spec.pad_value)
        for name, spec in SPECS.items()
        if live < SIZE
    ]

    def step() -> None:
        for name, buffer in static.items():
            buffer[: rows_of(name, live)].copy_(given[name], non_blocking=True)
        for tail, pad in tails:
            tail.fill_(pad)
        graph.replay()

    return step


def call_runner(runner: GraphRunner, rows: int, given: dict[str, torch.Tensor]) -> Any:
    return runner(Batch(rows, rows, 1), **given)


def keep_outputs(call: Callable[[], Any]) -> Callable[[], None]:
    """The same by a host that has the last outputs until it has the next ones."""
    kept = [None]

    def step() -> None:
        kept[0] = call()

    return step


def graph_of(runner: GraphRunner, size: int) -> Any:
    entries = runner.graphs.owners()[0].entries
    return next(entry.parts[0] for found, entry in entries.items() if found.num_tokens == size)


def memmoves(given: dict[str, torch.Tensor]) -> Callable[[], None]:
    """The bytes of a step's inputs, moved one after the other into pinned memory: into another
    place at each of 64 steps, as whoever does not wait for the device must."""
    into = torch.empty(4 << 20, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    steps, at = [], into.data_ptr()
    for _ in range(64):
        moves = []
        for value in given.values():
            moves.append((at, value.data_ptr(), value.nbytes))
            at += -(-value.nbytes // 256) * 256
        steps.append(moves)
    memmove, turns = ctypes.memmove, itertools.cycle(steps)

    def move() -> None:
        for to, start, size in next(turns):
            memmove(to, start, size)

    move.kept = into, given  # type: ignore[attr-defined]
    return move


def write_slot(runner: GraphRunner, batch: Batch, given: dict[str, Any]) -> Callable[[], Any]:
    """A step whose inputs are written by numpy to a slot that is kept."""
    slot = runner.slot(batch)
    places = [(tensor.numpy(), given[name]) for name, tensor in slot.items()]

    def step() -> Any:
        for place, value in places:
            place[:] = value
        return runner(slot)

    return step


def compiled(device: str, given: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """The same forward by torch's own graphs, with inputs copied to the device by hand."""
    forward = torch.compile(lambda input_ids, **_: input_ids + 1, mode="reduce-overhead")

    def step() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return forward(**{n: v.to(device, non_blocking=True) for n, v in given.items()})

    with torch.no_grad():
        for _ in range(4):
            step()
    return torch.no_grad()(step)


def misses(runner: GraphRunner) -> dict[str, Callable[[], Any]]:
    """A batch that no graph serves: what it takes to run it."""
    large = values(TOO_LARGE)
    on_device = {name: value.to(runner.pool.device) for name, value in large.items()}
    return {
        "a miss, the whole call, 5 device inputs": partial(
            call_runner, runner, TOO_LARGE, on_device
        ),
        "the forward alone, the same inputs": partial(runner.graphs.setup.forward, **on_device),
    }


def whole_calls(device: str, measure: Callable[..., list[float]]) -> dict[str, float]:
    """Host microseconds of whole calls, of the replay alone and of the memmoves alone."""
    options = {
        name: GraphOptions(inputs_in_graph=name == "fetched") for name in ("fetched", "staged")
    }
    runners = {name: decode_runner(device, options=each) for name, each in options.items()}
    # A graph that fetches inputs is replayed by its runner alone.
    bare = decode_runner(device, options=options["staged"])
    for runner in (*runners.values(), bare):
        runner.capture()
    graph = graph_of(bare, SIZE)
    steps: dict[str, Callable[[], Any]] = {BARE: graph.replay}
    for rows, kind in ((SIZE, "at a captured size"), (LIVE, "padded")):
        on_host = values(rows)
        on_device = {name: value.to(device) for name, value in on_host.items()}
        pinned = {
            name: value.pin_memory() if device == "cuda" else value
            for name, value in on_host.items()
        }
        batch = Batch(rows, rows, 1)
        steps[f"{MEMMOVES}, {kind}"] = memmoves(on_host)
        for name, runner in runners.items():
            for place, given in (("host", on_host), ("device", on_device)):
                call = partial(call_runner, runner, rows, given)
                steps[f"{name}, 5 {place} inputs, {kind}"] = call
            if rows == SIZE:
                in_place = dict(runner.inputs.layout(SIZE, SIZE).views)
                call = partial(call_runner, runner, rows, in_place)
                steps[f"{name}, 5 inputs in place, {kind}"] = call
        arrays = {name: value.numpy() for name, value in on_host.items()}
        fetched = runners["fetched"]
        steps[f"fetched, 5 host inputs, outputs kept, {kind}"] = keep_outputs(
            partial(call_runner, fetched, rows, on_host)
        )
        steps[f"slot, written by numpy, {kind}"] = write_slot(fetched, batch, arrays)
        steps[f"slot, nothing written, {kind}"] = partial(fetched, fetched.slot(batch))
        for place, given in (("host", pinned), ("device", on_device)):
            steps[f"by hand, 5 {place} inputs, {kind}"] = by_hand(graph, device, given)
        if device == "cuda" and rows == SIZE:
            for place, given in (("host", pinned), ("device", on_device)):
                steps[f"{COMPILED}, 5 {place} inputs"] = compiled(device, given)
    steps.update(misses(runners["fetched"]))
    nothing, *times = measure(lambda: None, *steps.values())
    for runner in (*runners.values(), bare):
        runner.close()
    return {name: found - nothing for name, found in zip(steps, times, strict=True)}
