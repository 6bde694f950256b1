"""After torch_npu's queue of launches has ended nothing is handed out: run in processes of their
own by `test_launch_queue.py`, as only a new process gets out of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import graphrt_ascend_sim as simulator
import pytest
import torch
from attention_models import Decoder, runner, steps

from graphrt import (
    BatchDescriptor,
    GraphOptions,
    GraphPool,
    GraphRunner,
    InputSpec,
    forward_context,
    wrapper_class,
)
from graphrt.ascend.driver import launch_queue
from graphrt.errors import LaunchQueueError

INPUTS = {"x": InputSpec(torch.float32, ("tokens", 8))}


def doubling(mode: str, **options: Any) -> GraphRunner:
    run = GraphRunner(
        lambda x: x * 2,
        mode=mode,
        sizes=[2, 4],
        inputs=INPUTS,
        outputs=("tokens", 8),
        options=GraphOptions(**options),
    )
    run.capture()
    for rows in (4, 3, 7):
        assert (run(x=torch.ones(rows, 8)).cpu() == 2).all()
    return run


def refused(*calls: Callable[[], Any]) -> None:
    """Each raises the named error, twice."""
    for call in (*calls, *calls):
        with pytest.raises(LaunchQueueError, match="start the process anew"):
            call()


def stands_still() -> None:
    """Wait for the queue's thread: where the host waited too, it is on its way to where it hangs,
    and as long as it uses time the queue counts as alive."""
    (launching,) = launch_queue._launching
    before_ns = -1
    for _ in range(100):
        try:
            now_ns = time.clock_gettime_ns(launching._clock)
        except OSError:  # it has ended
            return
        if now_ns == before_ns:
            return
        before_ns = now_ns
        time.sleep(0.1)
    pytest.fail("the thread goes on")


def end_it(*, seen: bool, waits: bool) -> None:
    """Let an operator of the host fail in the queue; the host sees the error and goes on, or has
    not seen it yet. With `waits` it is waiting for the queue when that happens."""
    x = torch.ones(4, device="npu")
    torch.npu.synchronize()
    simulator.fail_call("aclnnInplaceAdds")
    x.add_(1)
    if not waits:
        time.sleep(0.2)
    if seen:
        with pytest.raises(RuntimeError, match="inner error"):
            torch.npu.synchronize()
        stands_still()


def after_an_operator_of_the_host(mode: str, *, seen: bool, waits: bool, on_device: bool) -> None:
    run = doubling(mode)
    inputs = {rows: torch.full((rows, 8), 5.0) for rows in (4, 3, 7)}
    if on_device:
        inputs = {rows: x.to("npu") for rows, x in inputs.items()}
    end_it(seen=seen, waits=waits)
    refused(
        *[lambda x=x: run(x=x) for x in inputs.values()],
        run.recapture,
        lambda: doubling(mode),
    )


def after_an_error_in_staging(mode: str) -> None:
    run = doubling(mode)
    simulator.fail_call("aclrtMemcpyAsync")
    # The queue ends while this step is under way: torch_npu may be the first to say so, where the
    # outputs are copied.
    with pytest.raises((LaunchQueueError, RuntimeError), match=r"anew|inner error"):
        run(x=torch.full((4, 8), 5.0))
    refused(*[lambda rows=rows: run(x=torch.full((rows, 8), 5.0)) for rows in (4, 3, 7)])


def with_tasks() -> None:
    run = runner(Decoder(4), sizes=(8,), options=GraphOptions(check="off"))
    run.capture()
    todo = steps(3, most=8)
    run(todo[0].batch, updates=todo[0].updates, **todo[0].values)
    end_it(seen=True, waits=False)
    refused(
        *[lambda step=step: run(step.batch, updates=step.updates, **step.values) for step in todo]
    )


def wrapper_of_a_host() -> None:
    pool, x = GraphPool(), torch.ones(4, 8, device="npu")
    wrap = wrapper_class(pool.platform)(
        lambda x: x * 2, "FULL", pool=pool, options=GraphOptions(lazy=True)
    )

    def step() -> torch.Tensor:
        with forward_context("FULL", BatchDescriptor(4)):
            return wrap(x)

    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        assert (step().cpu() == 2 * value).all()
    # It puts nothing into the queue, and is served as long as that lives.
    for _ in range(20):
        assert (step().cpu() == 6).all()
    end_it(seen=True, waits=False)
    refused(step)


def without_a_queue() -> None:
    """With TASK_QUEUE_ENABLE=0 an operator that fails ends nothing."""
    run = doubling("FULL_AND_PIECEWISE")
    x = torch.ones(4, device="npu")
    simulator.fail_call("aclnnInplaceAdds")
    with pytest.raises(RuntimeError, match="507899"):
        x.add_(1)
    for rows in (4, 3, 7):
        assert (run(x=torch.full((rows, 8), 5.0)).cpu() == 10).all()


def alive(rounds: int) -> None:
    """Nobody is told that it has ended while it lives, whatever goes through it."""
    run = doubling("FULL", check="off")
    x = torch.ones(4, 8, device="npu")
    for turn in range(rounds):
        if turn % 7 == 0:
            time.sleep(0.003)
        if turn % 11 == 0:
            torch.npu.synchronize()
        run(x=x if turn % 2 else torch.ones(3, 8))
    assert (run(x=torch.ones(4, 8)).cpu() == 2).all()
