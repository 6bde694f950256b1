"""First steps after captures, under random schedules of the device: run by `test_first_steps.py`.

Nothing waits for the device between a capture and the steps that follow it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from attention_models import (
    HEADS,
    WIDTH,
    Decoder,
    Step,
    differing,
    eager_outputs,
    replayed,
    runner,
    steps,
)
from schedules import scheduled

from graphrt import (
    BatchDescriptor,
    GraphOptions,
    GraphPool,
    GraphRunner,
    forward_context,
    wrapper_class,
)

LAZY = GraphOptions(lazy=True)


class Plain:
    """Layers without tasks, that read what the layer before has just written."""

    def __init__(self, layers: int = 12) -> None:
        self.layers = layers
        self.bias = torch.full((HEADS, WIDTH), 0.25, dtype=torch.bfloat16).to("npu")

    def __call__(self, x: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
        for _ in range(self.layers):
            x = (x + self.bias) * 0.5 + x
        return x


FORWARDS: dict[str, Callable[[], Any]] = {"tasks": lambda: Decoder(4), "plain": Plain}


def streams(which: str) -> Callable[[], Any]:
    """What gives the stream of each step: the one that captures, or others in turn."""
    if which == "same":
        return torch.npu.current_stream
    others = itertools.cycle([torch.npu.Stream() for _ in range(3)])
    return lambda: next(others)


def planned(count: int, seed: int, tasks: bool) -> list[Step]:
    todo = steps(count, most=8, seed=seed)
    return todo if tasks else [Step(step.batch, step.values, None) for step in todo]


def serve(run: GraphRunner, todo: list[Step], stream_of: Callable[[], Any]) -> list[torch.Tensor]:
    outputs = []
    for step in todo:
        with torch.npu.stream(stream_of()):
            outputs.append(replayed(run, step))
    return outputs


def after_capture(kind: str, which: str) -> list[int]:
    todo = planned(3, 1, kind == "tasks")
    with runner(FORWARDS[kind](), platform="ascend-sim") as run:
        run.capture()
        outputs = serve(run, todo, streams(which))
        return compare(run, outputs, todo)


def after_recapture(kind: str, which: str) -> list[int]:
    todo = planned(4, 2, kind == "tasks")
    with runner(FORWARDS[kind](), platform="ascend-sim") as run:
        run.capture()
        stream = streams(which)()
        outputs = serve(run, todo[:2], lambda: stream)
        run.recapture()
        # On the stream that the pool knows from before.
        outputs += serve(run, todo[2:], lambda: stream)
        return compare(run, outputs, todo)


def after_lazy_captures(kind: str, which: str) -> list[int]:
    todo = planned(6, 3, kind == "tasks")
    with runner(FORWARDS[kind](), platform="ascend-sim", options=LAZY) as run:
        outputs = serve(run, todo, streams(which))
        return compare(run, outputs, todo)


def after_a_lazy_wrapper(kind: str, which: str) -> list[int]:
    """A host with a wrapper of its own captures on one stream and replays on another."""
    forward, stream_of = FORWARDS["plain"](), streams(which)
    pool = GraphPool("ascend-sim")
    wrapped = wrapper_class(pool.platform)(forward, "FULL", pool=pool, options=LAZY)
    table = torch.zeros((4, 4), dtype=torch.int32).to("npu")
    x = torch.ones((4, HEADS, WIDTH), dtype=torch.bfloat16).to("npu")
    torch.npu.synchronize()
    replays = []
    for _ in range(3):
        with torch.npu.stream(stream_of()), forward_context("FULL", BatchDescriptor(4)):
            replays.append(wrapped(x, table).clone())
    torch.npu.synchronize()
    expected = forward(x, table).cpu()
    outputs = [out.cpu() for out in replays]
    pool.close()
    return differing(outputs, [expected] * 3)


def compare(run: GraphRunner, outputs: list[torch.Tensor], todo: list[Step]) -> list[int]:
    torch.npu.synchronize()
    return differing([out.cpu() for out in outputs], eager_outputs(run, todo))


WAYS = (after_capture, after_recapture, after_lazy_captures, after_a_lazy_wrapper)


def all_of_it() -> list[str]:
    """The names of the ways whose steps were wrong."""
    return [
        f"{way.__name__}({kind}, {which}): {wrong}"
        for way in WAYS
        for kind in FORWARDS
        for which in ("same", "other")
        if (wrong := way(kind, which))
    ]


def under(seeds: Iterable[int]) -> list[str]:
    """The same under several random schedules, one after the other."""
    faults = []
    for seed in seeds:
        with scheduled(f"random:{seed}"):
            faults += [f"random:{seed}, {wrong}" for wrong in all_of_it()]
    return faults
