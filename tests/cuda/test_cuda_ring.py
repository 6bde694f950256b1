"""Graphs that fetch their inputs: each step sees its own, whatever the device is behind with."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from graphrt import Batch, GraphOptions, GraphPool, GraphRunner, Host, InputSpec, get_platform
from graphrt.errors import StaleInputError
from tests.core.ring_steps import Log, mixed_steps

pytestmark = pytest.mark.cuda

LONG = 150_000_000
"""Clock cycles that the device is kept busy for: some 80 ms, longer than the steps of a ring."""


def behind() -> None:
    torch.cuda._sleep(LONG)


def in_new_thread(work: Callable[[], Any]) -> Any:
    """What `work` gives in a thread in which torch has not used the device yet."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_new_thread_may_begin_with_a_step_on_host_inputs(mode):
    spec = InputSpec(torch.float32, ("tokens", 8))
    with GraphRunner(
        lambda x: x * 2, mode=mode, sizes=[4], inputs={"x": spec}, outputs=("tokens", 8),
        platform="cuda",
    ) as runner:  # fmt: skip
        runner.capture()
        assert runner.inputs.transport.ring is not None
        for value in (1.0, 2.0, 3.0):
            for rows in (4, 3, 7):  # a hit, a padded one, and one that is too large
                x = torch.full((rows, 8), value)
                out = in_new_thread(partial(runner, x=x))
                assert torch.equal(out.cpu(), x * 2)


def test_a_runner_can_be_made_captured_and_verified_in_different_threads():
    spec = InputSpec(torch.float32, ("tokens", 8))
    make = partial(
        GraphRunner, lambda x: x * 2, mode="FULL_AND_PIECEWISE", sizes=[2, 4], inputs={"x": spec},
        outputs=("tokens", 8), platform="cuda",
    )  # fmt: skip
    runner = in_new_thread(make)
    in_new_thread(runner.capture)
    for rows in (1, 2, 3, 4):
        x = torch.full((rows, 8), float(rows))
        assert torch.equal(in_new_thread(partial(runner, x=x)).cpu(), x * 2)
        assert torch.equal(in_new_thread(partial(runner.verify, x=x)).cpu(), x * 2)
    in_new_thread(runner.recapture)
    assert torch.equal(in_new_thread(partial(runner, x=x)).cpu(), x * 2)
    in_new_thread(runner.close)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_thousands_of_mixed_steps_behind_a_slow_device_see_their_own_inputs(mode):
    log = Log("cuda", "cuda", 10_000, mode=mode)
    assert log.runner.inputs.transport.ring is not None
    aborted = mixed_steps(
        log, 10_000, 7, device=0.3, slots=0.2, aborts=0.02, recaptures=0.001, behind=behind
    )
    assert aborted > 50
    log.runner.close()


def test_the_ring_wraps_behind_a_busy_device_and_the_host_waits():
    log, rng = Log("cuda", "cuda", 300, mode="FULL"), random.Random(1)
    steps = [log.values(rng, step, 1 + step % 16, 1) for step in range(300)]
    # More steps than slots, prepared before, so that none is free.
    behind()
    for step, values in enumerate(steps):
        log.runner(Batch(1 + step % 16, 1 + step % 16, 1), **values)
    log.check(300)
    assert log.runner.inputs.transport.ring.waits > 0
    log.runner.close()


def test_failed_launches_do_not_shift_the_slots_of_the_input_ring():
    log, rng = Log("cuda", "cuda", 500, mode="FULL"), random.Random(2)
    for step in range(500):
        if step % 50 == 10:
            behind()
        if step % 3 == 0:
            log.abort(rng, step)
        log.run(rng, step)
    log.check(500)
    log.runner.close()


def test_two_runners_of_a_pool_have_separate_input_rings():
    pool = GraphPool("cuda")
    logs = [Log("cuda", "cuda", 400, pool=pool, mode="FULL") for _ in range(2)]
    rng = random.Random(5)
    for step in range(400):
        if step % 100 == 20:
            behind()
        for log in rng.sample(logs, 2):
            log.run(rng, step, device=0.2)
    for log in logs:
        log.check(400)
        log.runner.close()
    pool.close()


def test_inputs_are_fetched_before_a_bind_reads_them():
    seen: list[torch.Tensor] = []

    def bind(buffers: Any, descriptor: Any, phase: str) -> None:
        if phase in ("replay", "eager"):
            seen.append(buffers["step"].clone())

    log, rng = Log("cuda", "cuda", 200, bind=bind), random.Random(6)
    behind()
    for step in range(200):
        log.run(rng, step, device=0.2)
    log.check(200)
    assert torch.cat(seen).tolist() == list(range(1, 201))
    log.runner.close()


def test_a_graph_replayed_outside_of_its_runner_raises_at_the_next_step():
    log, rng = Log("cuda", "cuda", 10, mode="FULL"), random.Random(7)
    values = log.values(rng, 0, 4, 1)
    log.runner(Batch(4, 4, 1), **values)
    entry = next(iter(log.runner.graphs.owners()[0].entries.values()))
    torch.cuda.synchronize()
    entry.parts[0].graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(StaleInputError, match="another step's slot"):
        log.runner(Batch(4, 4, 1), **values)
    for step in range(1, 10):
        log.run(rng, step)
    log.check(10)
    log.runner.close()


def test_inputs_above_the_fetch_limit_are_staged(monkeypatch):
    monkeypatch.setattr(get_platform("cuda"), "fetched_bytes", 4096)
    log = Log("cuda", "cuda", 600, width=64)
    mixed_steps(log, 600, 8, device=0.3, slots=0.3, aborts=0.05, behind=behind)
    log.runner.close()


def test_inputs_of_a_megabyte_are_fetched_and_right(monkeypatch):
    monkeypatch.setattr(get_platform("cuda"), "fetched_bytes", 2 << 20)
    log = Log("cuda", "cuda", 200, width=8192)
    mixed_steps(log, 200, 9, device=0.3, behind=behind)
    log.runner.close()


def test_inputs_are_copied_with_inputs_in_graph_switched_off():
    log = Log("cuda", "cuda", 100, inputs_in_graph=False)
    assert log.runner.inputs.transport.ring is None
    mixed_steps(log, 100, 10, device=0.3)
    log.runner.close()


def device_work(call: Any) -> list[str]:
    """Names of what the device did for `call`."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type is DeviceType.CUDA]


@pytest.mark.parametrize("place", ["cuda", "cpu"])
@pytest.mark.parametrize("rows", [8, 5])
def test_a_step_fetches_its_inputs_in_a_single_launch_without_memcpy(place, rows):
    log, rng = Log("cuda", "cuda", 4, mode="FULL"), random.Random(11)
    values = log.values(rng, 0, rows, 1)
    values = {name: value.to(place) for name, value in values.items()}
    log.runner(Batch(rows, rows, 1), **values)
    torch.cuda.synchronize()
    if not device_work(lambda: values["ids"].to("cuda").add_(1)):
        pytest.skip("the profiler sees no device work here")
    work = device_work(lambda: log.runner(Batch(rows, rows, 1), **values))
    assert sum("graphrt_fetch_inputs" in name for name in work) == 1, work
    assert not any("Memcpy" in name for name in work), work
    log.check(1)
    log.runner.close()


def test_the_step_that_captures_lazily_fetches_its_inputs():
    runner = GraphRunner(
        lambda x: x + 1,
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 8),
        mode="FULL",
        sizes=[1, 2, 4],
        platform="cuda",
        options=GraphOptions(inputs_in_graph=True, lazy=True),
    )
    for rows in (3, 1, 4, 2, 3, 1):
        x = torch.rand(rows, 8)
        assert torch.equal(runner(x=x).cpu(), x + 1)
    runner.close()


def test_inputs_are_fetched_on_whichever_stream_a_step_runs():
    log, rng = Log("cuda", "cuda", 200, mode="FULL", bind=None), random.Random(13)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for step in range(200):
        with torch.cuda.stream(rng.choice(streams)):
            if step % 50 == 10:
                behind()
            log.run(rng, step)
    torch.cuda.synchronize()
    log.check(200)
    log.runner.close()


def test_state_is_saved_and_trials_pass_with_fetched_inputs():
    state = torch.zeros(4, device="cuda")

    def forward(x: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        return x * 2

    runner = GraphRunner(
        forward,
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
        mode="FULL",
        sizes=[2, 4],
        platform="cuda",
        host=Host(),
        options=GraphOptions(inputs_in_graph=True, check="always", strict=True),
    )
    runner.capture()
    for count in range(1, 9):
        x = torch.rand(1 + count % 4, 4)
        assert torch.equal(runner(x=x).cpu(), x * 2)
        assert state.tolist() == [count] * 4
    runner.close()
