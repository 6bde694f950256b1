"""After Ctrl-C anywhere in a capture, recapture, lazy capture or replay, the runner still works."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import interrupts
import pytest
import torch
from test_runner import rows, runner

from graphrt import (
    Dispatch,
    GraphOptions,
    GraphRunner,
    Host,
    HostArg,
    Reason,
    UpdatableTask,
    current_context,
    eager_break,
)
from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.errors import CaptureSyncError
from graphrt.core.base.thread_mode import autocast_depth, is_watched, set_for_capture
from graphrt.core.base.torch_names import dispatch_modes
from graphrt.core.inputs.outputs import OutputLayout
from graphrt.core.replay.recording import current_capture, under_way, warming_up
from graphrt.cpu import graph
from graphrt.cpu.tape import refusals
from tests.draws import MORE

SEED = int(os.environ.get("GRAPHRT_TEST_SEED", "0"))
COUNT = 2 * MORE
"""How many interrupts of each kind and way."""

NUMPY = torch.Tensor.numpy


class Served:
    """A runner with everything that a capture has: segments, eager parts, tasks, state."""

    def __init__(self, **options: Any) -> None:
        self.steps = torch.zeros(1)
        task = UpdatableTask(
            "scale",
            lambda x, out, factor: torch.mul(x, factor, out=out),
            {"factor": HostArg(axis=None)},
            at_capture=lambda descriptor: {"factor": 1.0},
        )

        @eager_break
        def middle(hidden: torch.Tensor) -> torch.Tensor:
            return hidden + 1

        def forward(x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            hidden = middle(x * 2)
            out = torch.empty_like(hidden)
            task(hidden, out)
            return out + x

        self.run: GraphRunner = runner(
            forward,
            mode="FULL_AND_PIECEWISE",
            host=Host(state=(self.steps,)),
            **options,
        )

    def step(self, count: int, value: float = 1.0, factor: float = 3.0) -> torch.Tensor:
        return self.run(x=rows(count, value), updates={"scale": {"factor": factor}})

    def check(self, *, hits: bool = True) -> None:
        """Every batch is served, rightly, and by its graph."""
        for count in (1, 2, 3, 4, 9):
            for value, factor in ((1.0, 3.0), (-2.0, 0.5)):
                out = self.step(count, value, factor)
                assert torch.equal(out, rows(count, (value * 2 + 1) * factor + value))
                dispatch = self.run.last_dispatch
                assert dispatch is not None
                wanted = Reason.TOO_LARGE if count == 9 else Reason.HIT
                assert dispatch.reason is wanted or not hits or self.is_left_aside(dispatch)
        keys = [(each.mode, each.descriptor) for each in self.run.graphs.records]
        assert len(keys) == len(set(keys))
        assert set(keys) == {(each.mode, each.descriptor) for each in self.run.dispatcher.published}

    def is_left_aside(self, dispatch: Dispatch) -> bool:
        """Whether an interrupted look at the host's changes has put the graph in quarantine."""
        failures = [record.failure or "" for record in self.run.report().trust.trials]
        looks = [
            failure for failure in failures if "a look at what the host has changed" in failure
        ]
        return dispatch.reason is Reason.QUARANTINED and bool(looks)


def check_nothing_is_left(pool: Any) -> None:
    assert current_context() is None
    assert current_capture() is None
    assert not warming_up.get() and not under_way
    assert pool.owner is None
    assert not dispatch_modes() and not is_watched()
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert autocast_depth() == 0 and torch.is_autocast_cache_enabled()
    assert gc.isenabled() and gc.get_freeze_count() < 5000
    assert torch.Tensor.numpy is NUMPY and not refusals.guards.users
    assert not graph.hooked_calls.users and not graph.hooked_code.users
    free: list[bool] = []
    thread = threading.Thread(target=lambda: free.append(takes(pool.capture_lock)))
    thread.start()
    thread.join()
    assert free == [True]


def takes(lock: Any) -> bool:
    taken: bool = lock.acquire(timeout=5)
    if taken:
        lock.release()
    return taken


def reads_are_refused() -> None:
    with pytest.raises(CaptureSyncError):
        runner(lambda x: x + float(x.numpy().sum()), sizes=[2]).capture()


def captured(**options: Any) -> Served:
    served = Served(**options)
    served.run.capture()
    return served


def prepare_capture() -> tuple[Served, Callable[[], Any]]:
    served = Served()
    return served, served.run.capture


def prepare_recapture() -> tuple[Served, Callable[[], Any]]:
    served = captured()
    served.step(2)
    return served, served.run.recapture


def prepare_lazy_capture() -> tuple[Served, Callable[[], Any]]:
    served = Served(options=GraphOptions(lazy=True))
    return served, lambda: served.step(3)


def prepare_next() -> tuple[Served, Callable[[], Any]]:
    served = Served()
    served.run.capture_next()
    served.step(2)
    return served, lambda: served.run.capture_next()


def prepare_step_meanwhile() -> tuple[Served, Callable[[], Any]]:
    served = Served()
    while served.run.capture_next().left > 1:
        pass
    return served, lambda: served.step(3, 5.0, 7.0)


def prepare_replay() -> tuple[Served, Callable[[], Any]]:
    served = captured()
    return served, lambda: served.step(3, 5.0, 7.0)


KINDS = {
    "capture": prepare_capture,
    "recapture": prepare_recapture,
    "lazy": prepare_lazy_capture,
    "next": prepare_next,
    "meanwhile": prepare_step_meanwhile,
    "replay": prepare_replay,
}


def check(kind: str, served: Served) -> None:
    """What an interrupt of this kind must leave, and that all can go on."""
    check_nothing_is_left(served.run.pool)
    if kind in ("capture", "recapture", "next", "meanwhile"):
        steps = served.steps.clone()
        if kind in ("next", "meanwhile"):
            served.step(3)
            steps = served.steps.clone()
            while served.run.capture_next().left:
                pass
        else:
            served.run.capture()
        assert torch.equal(served.steps, steps)
    served.check()
    check_nothing_is_left(served.run.pool)


def interrupt(kind: str, call: Callable[[Callable[[], Any]], Any]) -> bool:
    """Whether the call was interrupted; everything is checked afterwards."""
    served, function = KINDS[kind]()
    stopped = False
    try:
        call(function)
    except KeyboardInterrupt:
        stopped = True
    check(kind, served)
    return stopped


@pytest.mark.draws
@pytest.mark.parametrize("lines", [False, True], ids=["signals", "lines"])
@pytest.mark.parametrize("kind", KINDS)
def test_after_an_interrupt_at_any_line_or_opcode_the_runner_still_works(kind, lines):
    interrupt(kind, lambda function: function())  # what the first run caches is no place later
    every = interrupts.Places(lines=lines)
    interrupt(kind, every)
    if not every.seen:
        pytest.skip("this Python traces no opcodes of frames, as 3.12.1 does not")
    rng = random.Random(f"{SEED} {kind} {lines}")
    for _ in range(COUNT):
        places = interrupts.Places(rng.randrange(every.seen), lines=lines)
        try:
            # A run may have fewer places than the one that was counted: the last is not reached.
            assert interrupt(kind, places) or places.seen <= places.at
        except BaseException as error:
            raise AssertionError(f"interrupted at {places.where}, place {places.at}") from error
    reads_are_refused()


@pytest.mark.parametrize("lines", [False, True], ids=["signals", "lines"])
@pytest.mark.parametrize("depth", [0, 1])
def test_an_interrupt_while_capture_settings_change_restores_autocast(depth, lines):
    """Once more often entered than left, autocast keeps its casts of weights until the process
    ends: all tests of autocast failed after one such interrupt."""

    @undoing
    def capture_nothing(name: str, undo: Undo) -> None:
        set_for_capture(undo)

    with contextlib.ExitStack() as stack:
        if depth:
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        for at in itertools.count():
            places = interrupts.Places(at, lines=lines)
            with contextlib.suppress(KeyboardInterrupt):
                places(functools.partial(capture_nothing, "nothing"))
            assert torch.autocast_increment_nesting() == depth + 1, places.where
            torch.autocast_decrement_nesting()
            assert torch.is_autocast_cache_enabled(), places.where
            assert torch.is_grad_enabled(), places.where
            if not places.where:
                break
    if at == 0:
        pytest.skip("this Python traces no opcodes of frames, as 3.12.1 does not")


@pytest.mark.parametrize("line", range(6))
def test_output_axes_forgotten_by_an_interrupted_recapture_are_found_again(line):
    """Before each line of what forgets them: too few of all places for chance to find."""
    seen = 0

    def trace(frame: Any, event: str, arg: object) -> Any:
        if frame.f_code is not OutputLayout.forget.__code__:
            return None
        return stop

    def stop(frame: Any, event: str, arg: object) -> Any:
        nonlocal seen
        seen += event == "line"
        if event == "line" and seen == line + 1:
            raise KeyboardInterrupt
        return stop

    def call(function: Callable[[], Any]) -> None:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            function()
        finally:
            sys.settrace(before)

    assert interrupt("recapture", call) == (line < 5)


# Its times are nobody's to repeat: `make test` has the same interrupts by place.
@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_after_an_interrupt_signal_at_any_time_the_runner_still_works(kind):
    rng = random.Random(f"{SEED} {kind}")
    interrupt(kind, lambda function: function())
    _, function = KINDS[kind]()
    started = time.perf_counter()
    function()
    takes_s = time.perf_counter() - started
    for _ in range(COUNT):
        after_s = rng.uniform(1e-6, takes_s)
        with contextlib.suppress(ValueError):
            interrupt(kind, lambda call, s=after_s: interrupts.after_seconds(s, call))
    reads_are_refused()
