"""Two GPUs in one process: each runner works on its own, whichever device is current."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from graphrt import GraphPool, GraphRunner, InputSpec, KeyedGraphs, eager_break
from graphrt.core.base.errors import InvalidOptionError

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2,
        reason=f"needs two GPUs, this machine has {torch.cuda.device_count()}",
    ),
]

WIDTH = 64


class Served:
    """A runner of a small model on one GPU."""

    def __init__(self, index: int, *, mode: str = "FULL_AND_PIECEWISE") -> None:
        self.device = torch.device("cuda", index)
        torch.manual_seed(index)
        self.weight = torch.randn(WIDTH, WIDTH, device=self.device)
        cache = torch.zeros(8, WIDTH, device=self.device)

        @eager_break
        def attend(hidden: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            cache.index_copy_(0, slots, hidden)
            return cache.index_select(0, slots) * 2

        def forward(hidden: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            return attend(hidden @ self.weight, slots) + 1

        self.runner = GraphRunner(
            forward,
            mode=mode,
            sizes=[2, 4],
            max_num_reqs=4,
            max_num_tokens=8,
            inputs={
                "hidden": InputSpec(torch.float32, ("tokens", WIDTH)),
                "slots": InputSpec(torch.int64, ("tokens",), pad=7, index=True),
            },
            outputs=("tokens", WIDTH),
            device=self.device,
        )

    def serve(self, turn: int) -> None:
        rows = turn % 4 + 1
        generator = torch.Generator().manual_seed(turn)
        hidden = torch.randn(rows, WIDTH, generator=generator)
        out = self.runner(hidden=hidden, slots=torch.arange(rows))
        assert out.device == self.device
        expected = hidden.to(self.device) @ self.weight * 2 + 1
        torch.testing.assert_close(out, expected)


def test_runners_on_two_devices_are_right_when_interleaved():
    served = [Served(0), Served(1)]
    torch.cuda.set_device(0)
    for each in reversed(served):
        each.runner.capture()
    for turn in range(40):
        torch.cuda.set_device(turn // 3 % 2)  # current, and of no importance
        served[turn % 2].serve(turn)
    torch.cuda.set_device(0)
    for each in served:
        each.runner.recapture()
        each.serve(1)
        each.runner.close()
    assert torch.cuda.current_device() == 0


def test_runners_on_two_devices_are_right_from_two_threads():
    failed: list[BaseException] = []

    def work(index: int) -> None:
        try:
            served = Served(index)
            for _ in range(3):
                served.runner.capture()
                for turn in range(50):
                    served.serve(turn)
                served.runner.release()
            served.runner.close()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_a_capture_on_one_device_does_not_block_the_other_device():
    served = Served(1)
    served.runner.capture()
    begun, done = threading.Event(), threading.Event()
    x = torch.ones(4, device="cuda:0")
    results: list[Any] = []

    def forward() -> torch.Tensor:
        y = x + 1
        begun.set()
        results.append(done.wait(60))
        return y

    def capture() -> None:
        results.append(KeyedGraphs(GraphPool(device="cuda:0")).capture("key", forward))

    x.add_(0)
    torch.cuda.synchronize(0)
    thread = threading.Thread(target=capture)
    thread.start()
    assert begun.wait(60)
    for turn in range(10):
        served.serve(turn)
    other = torch.ones(4, device="cuda:1")
    graphs = KeyedGraphs(GraphPool(device="cuda:1"))
    assert graphs.capture("key", lambda: other + 2).replay().tolist() == [3.0] * 4
    served.runner.release()
    done.set()
    thread.join()
    assert results[0] is True, "the other device waited for this capture"
    assert results[1].replay().tolist() == [2.0] * 4
    served.runner.close()


def ends_first(quick: int, slow: int, cycles: int) -> bool:
    """Whether a replay on the device `quick` ends before one of so many cycles on `slow`, for whose
    end another thread waits."""
    x, y = (torch.ones(4, device=f"cuda:{index}") for index in (quick, slow))

    def long() -> torch.Tensor:
        torch.cuda._sleep(cycles)
        return y + 1

    graph = KeyedGraphs(GraphPool(device=quick)).capture("key", lambda: x + 1)
    with torch.cuda.device(slow):
        long_graph = KeyedGraphs(GraphPool(device=slow)).capture("key", long)
        torch.cuda.synchronize()
        ended = torch.cuda.Event()
    launched = threading.Event()

    def replay_and_wait() -> None:
        with torch.cuda.device(slow):
            long_graph.replay()
            ended.record()
            launched.set()
            torch.cuda.synchronize()

    thread = threading.Thread(target=replay_and_wait)
    thread.start()
    assert launched.wait(60)
    out = graph.replay()
    torch.cuda.synchronize(quick)
    is_first = not ended.query()
    thread.join()
    assert out.tolist() == [2.0] * 4
    return is_first


@pytest.mark.parametrize(("quick", "slow"), [(0, 1), (1, 0)])
def test_a_replay_ends_while_another_device_is_in_its_own(quick: int, slow: int) -> None:
    """Of 0.05 s; of 0.5 s and 5 s on a machine that was too busy for it."""
    assert any(ends_first(quick, slow, cycles) for cycles in (10**8, 10**9, 10**10))


def test_a_runner_with_a_pool_of_another_device_is_refused():
    pool = GraphPool(device=1)
    with pytest.raises(InvalidOptionError):
        GraphPool(device=0, stream=torch.cuda.Stream(1))
    with pytest.raises(InvalidOptionError):
        GraphRunner(
            lambda x: x,
            pool=pool,
            device="cuda:0",
            sizes=[1],
            inputs={"x": InputSpec(torch.float32, ("tokens",))},
        )
    assert pool.device == torch.device("cuda", 1)
