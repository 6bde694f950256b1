"""Other threads beside a capture, and a device that is nearly full."""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphrt import GraphRunner, InputSpec, Reason, errors

pytestmark = pytest.mark.cuda

MIB = 1 << 20


def in_thread(call: Callable[[], Any]) -> BaseException | None:
    """What `call` raised in another thread."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return raised[0] if raised else None


def beside(call: Callable[[], Any], times: int, mode: str = "FULL") -> tuple[GraphRunner, Any]:
    """A runner in whose first captures another thread makes a call; what these calls raised."""
    # No list: trials and captures put back what they find in Python.
    raised: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def forward(x: torch.Tensor) -> torch.Tensor:
        hidden = x * 2
        if torch.cuda.is_current_stream_capturing() and raised.qsize() < times:
            raised.put(in_thread(call))
        return hidden + 1

    runner = GraphRunner(
        forward,
        mode=mode,
        sizes=[2, 4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 8),
        platform="cuda",
    )
    return runner, raised


def draw() -> None:
    torch.rand(4, device="cuda")


CALLS = {"synchronize": torch.cuda.synchronize, "draw": draw}


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_of_another_thread_beside_a_capture_leaves_the_capture_and_its_next_call_right(
    call: Callable[[], Any], mode: str
) -> None:
    runner, raised = beside(call, 1, mode)
    with runner:
        runner.capture()
        error = raised.get_nowait()
        assert error is None or isinstance(error, RuntimeError)
        raised.put(None)
        assert in_thread(call) is None
        x = torch.rand(3, 8)
        for _ in range(3):
            assert torch.equal(runner(x=x).cpu(), x * 2 + 1)
            assert runner.last_dispatch is not None
            assert runner.last_dispatch.reason is Reason.HIT


def test_a_thread_that_ends_every_capture_is_named_with_the_lock_to_take() -> None:
    runner, raised = beside(torch.cuda.synchronize, 2)
    with runner:
        with pytest.raises(errors.CaptureError, match="capture_lock"):
            runner.capture()
        assert raised.qsize() == 2
        runner.capture()
        assert len(runner.report().graphs) == 2


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_thread_that_holds_the_capture_lock_is_not_beside_a_capture(
    call: Callable[[], Any],
) -> None:
    runner, _ = beside(call, 0)
    stop, wrong = threading.Event(), list[BaseException]()

    def work() -> None:
        while not stop.is_set():
            try:
                with runner.pool.capture_lock:
                    call()
            except BaseException as error:
                wrong.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    with runner:
        for _ in range(10):
            runner.recapture()
        stop.set()
        thread.join(60)
    assert wrong == []


@pytest.fixture
def nearly_full() -> Iterator[Callable[[int], None]]:
    """Leaves so many bytes of the device free, by a tensor of the host's."""
    held = []

    def fill(nbytes: int) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        held.append(torch.empty(free - nbytes, dtype=torch.uint8, device="cuda"))

    yield fill
    held.clear()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("mib", [16, 48])
def test_the_smaller_graphs_stay_on_a_nearly_full_device(
    nearly_full: Callable[[int], None], mib: int
) -> None:
    """At the largest size the forward needs more than there is. Beside the graph of the next one
    the rest has no room for a warm-up of the third: it is warmed up in the memory of the graphs."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        workspace = torch.empty(len(x) * mib * MIB, dtype=torch.uint8, device=x.device)
        return x + workspace[:1].fill_(1)

    runner = GraphRunner(
        forward,
        mode="FULL",
        sizes=[1, 2, 4, 8, 16],
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 8),
        platform="cuda",
    )
    with runner:
        nearly_full(12 * mib * MIB)
        with pytest.warns(errors.GraphsDroppedWarning):
            runner.capture()
        sizes = [each.descriptor.num_tokens for each in runner.report().graphs]
        assert sizes == [8, 4, 2, 1], runner.report().dropped
        # The first step is a trial, which runs the forward eagerly: of 2 rows, for which is room.
        x = torch.rand(2, 8)
        assert torch.equal(runner(x=x).cpu(), x + 1)
        assert runner.last_dispatch is not None and runner.last_dispatch.reason is Reason.HIT


def test_a_first_step_without_memory_for_its_trial_is_replayed_with_one_warning(
    nearly_full: Callable[[int], None],
) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        workspace = torch.empty(64 * MIB, dtype=torch.uint8, device=x.device)
        return x + workspace[:1].fill_(1)

    with GraphRunner(
        forward,
        mode="FULL",
        sizes=[2, 4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 8),
        platform="cuda",
    ) as runner:
        runner.capture()
        nearly_full(16 * MIB)
        x = torch.rand(2, 8)
        with pytest.warns(errors.GraphMemoryWarning, match="no memory was left"):
            assert torch.equal(runner(x=x).cpu(), x + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(8):
                assert torch.equal(runner(x=x).cpu(), x + 1)
                assert runner.last_dispatch is not None
                assert runner.last_dispatch.reason is Reason.HIT
        assert {each.status for each in runner.report().trust.trials} == {"untried"}
