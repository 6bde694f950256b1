"""A platform with two devices: each pool, capture and runner stays on its own device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from graphrt import BatchDescriptor, ForwardContext, GraphPool, GraphRunner, InputSpec, KeyedGraphs
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.device.platform import capture_lock, no_other_capture
from graphrt.cpu.platform import CpuPlatform

INPUTS = {"x": InputSpec(torch.float32, ("tokens", 4))}


class Devices(CpuPlatform):
    """A machine with two: each call notes on which one it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.local()
        self.calls: list[tuple[str, int]] = []

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return getattr(self.thread, "index", 0)

    @contextmanager
    def on_device(self, index: int | None) -> Iterator[None]:
        assert index is not None
        before, self.thread.index = self.current_device(), index
        try:
            yield
        finally:
            self.thread.index = before

    def note(self, name: str) -> None:
        self.calls.append((name, self.current_device()))

    def new_memory(self) -> Any:
        self.note("new_memory")
        return super().new_memory()

    def new_stream(self) -> Any:
        self.note("new_stream")

    def begin_capture(self, graph: Any, memory: Any) -> None:
        self.note("begin_capture")
        super().begin_capture(graph, memory)

    def reset_graphs(self, graphs: Any) -> None:
        self.note("reset_graphs")
        super().reset_graphs(graphs)

    def release_memory(self, memory: Any) -> None:
        self.note("release_memory")
        super().release_memory(memory)

    def noted(self) -> set[int]:
        devices, self.calls = {index for _, index in self.calls}, []
        return devices


@pytest.mark.trust
def test_all_platform_calls_of_a_runner_are_made_on_its_device():
    devices, ran = Devices(), set()

    def forward(x: torch.Tensor) -> torch.Tensor:
        ran.add(devices.current_device())
        return x + 1

    for index in (1, 0):
        runner = GraphRunner(
            forward, platform=devices, device=f"cpu:{index}", inputs=INPUTS, mode="FULL", sizes=[2]
        )
        assert runner.pool.device == torch.device("cpu", index)
        runner.capture()
        assert runner(x=torch.ones(2, 4)).sum() == 16
        assert runner(x=torch.ones(3, 4)).sum() == 24  # too large: eager
        runner.verify(x=torch.ones(1, 4))
        runner.close()
        assert devices.noted() == {index} and ran == {index}
        assert devices.current_device() == 0
        ran.clear()


def test_a_pool_is_on_the_device_current_at_its_construction():
    devices = Devices()
    with devices.on_device(1):
        pool = GraphPool(devices)
        graphs = KeyedGraphs(GraphPool(devices, device=0))
    assert (pool.device.index, graphs.pool.device.index) == (1, 0)
    wrapper, x = GraphWrapper(lambda x: x + 1, "FULL", pool=pool), torch.zeros(4)
    devices.noted()
    graph = KeyedGraphs(pool).capture("key", lambda: x + 1)
    assert graph.replay().tolist() == [1] * 4
    pool.close()
    assert devices.noted() == {1}
    with pytest.raises(InvalidOptionError, match="another device"):
        wrapper.move_to(graphs.pool)


@pytest.mark.parametrize(
    ("device", "words"), [("cpu:2", "no device of that index"), ("cuda:0", "another kind")]
)
def test_a_pool_refuses_a_missing_device_index_or_another_device_type(device, words):
    with pytest.raises(InvalidOptionError, match=words):
        GraphPool(Devices(), device=device)


def test_a_runner_refuses_a_device_type_that_torch_lacks():
    with pytest.raises(InvalidOptionError, match="torch has no such device here") as refused:
        GraphRunner(lambda x: x, device="xla", inputs=INPUTS, sizes=[2], platform=Devices())
    assert "got: xla" in str(refused.value)


def test_a_runner_refuses_a_device_other_than_its_pools():
    pool = GraphPool(Devices(), device=1)
    with pytest.raises(InvalidOptionError, match="another device"):
        GraphRunner(lambda x: x, pool=pool, device="cpu:0", inputs=INPUTS, sizes=[2])


def test_captures_on_two_devices_do_not_wait_for_each_other():
    devices = Devices()
    one, other = (GraphPool(devices, device=index) for index in (0, 1))
    begun, done = threading.Event(), threading.Event()
    x = torch.zeros(4)

    def first() -> None:
        def forward() -> torch.Tensor:
            begun.set()
            assert done.wait(30), "the other device waited"
            return x + 1

        results.append(KeyedGraphs(one).capture("key", forward))

    results: list[Any] = []
    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(30)
    graph = KeyedGraphs(other).capture("key", lambda: x + 2)
    assert graph.replay().tolist() == [2] * 4
    done.set()
    thread.join()
    assert results[0].replay().tolist() == [1] * 4


def test_no_other_capture_does_not_wait_and_is_false_during_another_devices_capture():
    mine, theirs = torch.device("cpu", 10), torch.device("cpu", 11)
    held, leave = threading.Event(), threading.Event()

    def capturing() -> None:
        with capture_lock(theirs):
            held.set()
            leave.wait(30)

    thread = threading.Thread(target=capturing)
    thread.start()
    assert held.wait(30)
    with capture_lock(mine):
        with no_other_capture(mine) as alone:
            assert not alone
        leave.set()
        thread.join()
        with no_other_capture(mine) as alone:
            assert alone
            free: list[bool] = []
            checking = threading.Thread(
                target=lambda: free.append(capture_lock(theirs).acquire(blocking=False))
            )
            checking.start()
            checking.join()
            assert free == [False]


def test_a_pool_on_a_single_device_has_no_other_device_check():
    assert GraphPool("cpu").elsewhere is None
    pool = GraphPool(Devices(), device=1)
    with ForwardContext("FULL", BatchDescriptor(1)):  # type: ignore[arg-type]
        assert pool.elsewhere is not None and pool.elsewhere()
    with pool.on_device():
        assert not pool.elsewhere()
