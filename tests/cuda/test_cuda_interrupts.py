"""Ctrl-C at any place of a capture, a recapture, a lazy capture or a replay leaves a GPU usable."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from graphrt import (
    Dispatch,
    GraphOptions,
    GraphRunner,
    Host,
    InputSpec,
    Reason,
    current_context,
    eager_break,
)
from tests.draws import MORE

sys.path.append(str(Path(__file__).parent.parent / "core"))
import interrupts

pytestmark = pytest.mark.cuda

SEED = int(os.environ.get("GRAPHRT_TEST_SEED", "0"))
COUNT = 6 * MORE
WIDTH = 4


@eager_break
def middle(hidden: torch.Tensor) -> torch.Tensor:
    return hidden + 1


class Served:
    """A runner with segments, eager parts and state."""

    def __init__(self, **options: Any) -> None:
        self.steps = torch.zeros(1, device="cuda")

        def forward(x: torch.Tensor) -> torch.Tensor:
            self.steps.add_(1)
            return middle(x * 2) * 3 + x

        self.run = GraphRunner(
            forward,
            mode="FULL_AND_PIECEWISE",
            sizes=[2, 4],
            inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
            outputs=("tokens", WIDTH),
            host=Host(state=[self.steps]),
            platform="cuda",
            **options,
        )

    def step(self, count: int, value: float = 1.0) -> torch.Tensor:
        return self.run(x=torch.full((count, WIDTH), value))

    def check(self) -> None:
        for count in (1, 2, 3, 4, 9):
            for value in (1.0, -2.0):
                out = self.step(count, value).cpu()
                assert torch.equal(out, torch.full((count, WIDTH), (value * 2 + 1) * 3 + value))
                dispatch = self.run.last_dispatch
                assert dispatch is not None
                wanted = Reason.TOO_LARGE if count == 9 else Reason.HIT
                assert dispatch.reason is wanted or self.is_left_aside(dispatch)

    def is_left_aside(self, dispatch: Dispatch) -> bool:
        """Whether an interrupted look at the host's changes has put the graph in quarantine, as
        docs/concepts/pools.md says."""
        failures = [record.failure or "" for record in self.run.report().trust.trials]
        looks = [each for each in failures if "a look at what the host has changed" in each]
        return dispatch.reason is Reason.QUARANTINED and bool(looks)


def check_nothing_is_left(pool: Any) -> None:
    assert current_context() is None and pool.owner is None
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.is_grad_enabled()
    torch.cuda.synchronize()


def captured(**options: Any) -> Served:
    served = Served(**options)
    served.run.capture()
    return served


def prepare_recapture() -> tuple[Served, Callable[[], Any]]:
    served = captured()
    served.step(2)
    return served, served.run.recapture


def prepare_capture() -> tuple[Served, Callable[[], Any]]:
    served = Served()
    return served, served.run.capture


def prepare_lazy_capture() -> tuple[Served, Callable[[], Any]]:
    served = Served(options=GraphOptions(lazy=True))
    return served, lambda: served.step(3)


def prepare_replay() -> tuple[Served, Callable[[], Any]]:
    served = captured()
    return served, lambda: served.step(3, 5.0)


KINDS = {
    "capture": prepare_capture,
    "recapture": prepare_recapture,
    "lazy": prepare_lazy_capture,
    "replay": prepare_replay,
}


def interrupt(kind: str, call: Callable[[Callable[[], Any]], Any]) -> None:
    served, function = KINDS[kind]()
    with contextlib.suppress(KeyboardInterrupt):
        call(function)
    check_nothing_is_left(served.run.pool)
    if kind in ("capture", "recapture"):
        served.run.capture()
    served.check()
    check_nothing_is_left(served.run.pool)
    served.run.close()


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_at_any_line_leaves_captures_and_replays_usable(kind: str) -> None:
    interrupt(kind, lambda function: function())
    every = interrupts.Places(lines=True)
    interrupt(kind, every)
    rng = random.Random(f"{SEED} {kind}")
    for _ in range(COUNT):
        places = interrupts.Places(rng.randrange(every.seen), lines=True)
        try:
            interrupt(kind, places)
        except BaseException as error:
            raise AssertionError(f"interrupted at {places.where}, place {places.at}") from error


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_at_any_time_leaves_captures_and_replays_usable(kind: str) -> None:
    rng = random.Random(f"{SEED} {kind}")
    interrupt(kind, lambda function: function())
    _, function = KINDS[kind]()
    started = time.perf_counter()
    function()
    takes_s = time.perf_counter() - started
    for _ in range(COUNT):
        after_s = rng.uniform(1e-6, takes_s)
        interrupt(kind, lambda call, s=after_s: interrupts.after_seconds(s, call))
