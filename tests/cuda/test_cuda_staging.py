"""Inputs of steps that the device is behind with: each step sees its own, and clean padding."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from graphrt import GraphOptions, GraphRunner, Host, InputSpec, Reason

pytestmark = pytest.mark.cuda

DEVICE = "cuda"
SIZES = [1, 2, 4, 8, 16]
ONE = InputSpec(torch.int64, (1,))
LONG, SHORT = 800_000_000, 20_000_000
"""Clock cycles that the device is kept busy for: some 400 and 10 ms."""


def behind(cycles: int) -> None:
    if DEVICE == "cuda":
        torch.cuda._sleep(cycles)


def pinned(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.int64, pin_memory=DEVICE == "cuda")


def logging_runner(width: int, steps: int) -> tuple[GraphRunner, torch.Tensor]:
    """A runner whose forward writes the sum of all that it saw into row `step` of a log."""
    log = torch.zeros(steps, dtype=torch.int64, device=DEVICE)

    def forward(ids: torch.Tensor, offset: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        log.index_copy_(0, step, (ids.sum() + offset.sum()).view(1))
        return ids + 1

    rows = InputSpec(torch.int64, ("tokens", width))
    runner = GraphRunner(
        forward,
        mode="FULL",
        sizes=SIZES,
        inputs={"ids": rows, "offset": ONE, "step": ONE},
        outputs=("tokens", width),
        platform=DEVICE,
        options=GraphOptions(check="off"),
    )
    runner.capture()
    return runner, log


@pytest.mark.parametrize("width", [1, 8192])
def test_a_thousand_steps_ahead_of_the_device_see_their_own_host_inputs(width):
    rng, expected = random.Random(0), []
    runner, log = logging_runner(width, 1000)
    reused = {"pageable": torch.empty(16, width, dtype=torch.int64), "pinned": pinned(16, width)}
    offset, step = pinned(1), torch.empty(1, dtype=torch.int64)
    behind(LONG)
    for number in range(1000):
        if number % 100 == 50:
            behind(SHORT)
        tokens, kind = rng.randint(1, 16), rng.choice(["fresh", "pageable", "pinned"])
        fresh = torch.empty(tokens, width, dtype=torch.int64)
        ids = fresh if kind == "fresh" else reused[kind][:tokens]
        ids.fill_(number + 1)
        offset.fill_(-3 * number)
        step.fill_(number)
        runner(ids=ids, offset=offset, step=step)
        assert runner.last_dispatch.reason is Reason.HIT
        ids.fill_(-7)
        offset.fill_(-7)
        step.fill_(0)
        expected.append((number + 1) * tokens * width - 3 * number)
    assert log.tolist() == expected
    runner.close()


def test_device_inputs_may_be_written_by_the_device_right_after_the_call():
    rng, expected = random.Random(1), []
    runner, log = logging_runner(4, 300)
    on_device = {
        "contiguous": torch.empty(16, 4, dtype=torch.int64, device=DEVICE),
        "strided": torch.empty(4, 16, dtype=torch.int64, device=DEVICE).t(),
    }
    host = pinned(16, 4)
    offset = torch.empty(1, dtype=torch.int64, device=DEVICE)
    step = torch.empty(1, dtype=torch.int64)
    behind(LONG)
    for number in range(300):
        if number % 50 == 25:
            behind(SHORT)
        tokens, kind = rng.randint(1, 16), rng.choice(["contiguous", "strided", "host"])
        ids = (host if kind == "host" else on_device[kind])[:tokens]
        ids.fill_(number + 1)
        offset.fill_(5 * number)
        step.fill_(number)
        runner(ids=ids, offset=offset, step=step)
        ids.fill_(-7)
        offset.fill_(-7)
        step.fill_(0)
        expected.append((number + 1) * tokens * 4 + 5 * number)
    assert log.tolist() == expected
    runner.close()


@pytest.mark.parametrize("kind", ["pageable", "pinned", "device"])
def test_a_step_does_not_synchronise(kind):
    runner, log = logging_runner(64, 8)
    inputs = []
    for number in range(8):
        make = {
            "pageable": lambda *shape: torch.empty(*shape, dtype=torch.int64),
            "pinned": pinned,
            "device": lambda *shape: torch.empty(*shape, dtype=torch.int64, device=DEVICE),
        }[kind]
        ids, offset, step = make(number + 1, 64), make(1), make(1)
        inputs.append({"ids": ids.fill_(2), "offset": offset.zero_(), "step": step.fill_(number)})
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        behind(SHORT)
        for values in inputs:
            runner(**values)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert log.tolist() == [2 * 64 * (number + 1) for number in range(8)]
    runner.close()


def owning_runner() -> tuple[GraphRunner, dict[str, Any]]:
    """A runner of one input, and its captured views by `bind`, the way a host gets at them."""
    views: dict[str, Any] = {}

    def bind(buffers: Any, descriptor: Any, phase: str) -> None:
        views.update(buffers)

    runner = GraphRunner(
        lambda x: x + 1,
        mode="FULL",
        sizes=[4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 8),
        platform=DEVICE,
        host=Host(bind=bind),
        options=GraphOptions(check="off"),
    )
    runner.capture()
    return runner, views


def test_an_input_at_its_captured_address_is_not_written():
    runner, views = owning_runner()
    own = views["x"]
    own.copy_(torch.arange(32.0).view(4, 8))
    expected, version = own + 1, own._version
    assert torch.equal(runner(x=own), expected)
    assert own._version == version
    runner.close()


def device_work(call: Any) -> list[str]:
    """Names of what the device did for `call`."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type is DeviceType.CUDA]


def test_an_input_at_its_captured_address_adds_no_device_work():
    runner, views = owning_runner()
    own = views["x"].fill_(1)
    other = own.clone()
    if not device_work(lambda: other.add_(1)):
        pytest.skip("the profiler sees no device work here")
    in_place, copied = device_work(lambda: runner(x=own)), device_work(lambda: runner(x=other))
    assert len(in_place) == 1, in_place
    assert len(copied) > 1, copied
    runner.close()
