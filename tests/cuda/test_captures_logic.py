"""How a capture is begun on CUDA, without a device: what torch does then, no dispatch mode sees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from graphrt.core.device.captures import OpenCapture
from graphrt.core.replay.recording import drawn_from
from graphrt.cuda import captures, memory
from graphrt.cuda.captures import CudaCaptures
from graphrt.trust.watching.watch import IssuedWatch


class Graph:
    """As torch's: a capture's begin makes the generator's seed and offset."""

    def __init__(self) -> None:
        self.begun: list[Any] = []

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        seed = torch.zeros(1, dtype=torch.int64)
        modes = list(_get_current_dispatch_mode_stack())
        self.begun.append((pool, capture_error_mode, modes, seed.is_inference()))

    def capture_end(self) -> None: ...


class Memory:
    def add(self, graph: Any) -> None: ...

    def capturing_on(self, stream: Any) -> None: ...


@pytest.mark.parametrize("inference", [False, True])
def test_no_torch_dispatch_mode_is_active_while_a_capture_begins(monkeypatch, inference):
    monkeypatch.setattr(captures.ForkWatch, "begin", lambda self: None)
    graph, watch = Graph(), IssuedWatch()
    tasks: Any = None
    opened: Any = OpenCapture("stream", Memory(), "pool")
    with torch.inference_mode(inference):
        watch.run(lambda: CudaCaptures(tasks)._begin(graph, opened), in_one=False)
        assert torch.is_inference_mode_enabled() is inference
    assert graph.begun == [("pool", "thread_local", [], False)]
    assert watch.operators == []


def test_generators_of_the_device_are_registered_before_a_capture_begins(monkeypatch):
    class Registering(Graph):
        def register_generator_state(self, generator: Any) -> None:
            self.begun.append(generator)

    monkeypatch.setattr(captures.ForkWatch, "begin", lambda self: None)
    of_device = SimpleNamespace(device=torch.device("cuda", 0))
    token = drawn_from.set([torch.Generator(), of_device])
    try:
        graph, tasks = Registering(), None
        opened: Any = OpenCapture("stream", Memory(), "pool")
        CudaCaptures(tasks)._begin(graph, opened)
    finally:
        drawn_from.reset(token)
    assert graph.begun[0] is of_device
    assert graph.begun[1][0] == "pool"


def test_no_torch_dispatch_mode_is_active_while_a_pool_is_held(monkeypatch):
    graph, watch = Graph(), IssuedWatch()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    monkeypatch.setattr(memory, "own_stream", lambda: None)
    watch.run(lambda: memory._Held(0, (0, 1)), in_one=False)
    assert graph.begun == [((0, 1), "thread_local", [], False)]
    assert watch.operators == []


def test_a_pool_whose_pinned_memory_is_being_freed_is_entered_once_that_is_gone(monkeypatch):
    emptied: list[None] = []

    class Refusing(Graph):
        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            if pool is not None and not emptied:
                raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")

        def reset(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Refusing)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    monkeypatch.setattr(memory, "own_stream", lambda: None)
    given_back: list[Any] = []
    for name in ("stop_routing_to_pool", "release_pool"):
        monkeypatch.setattr(memory, name, lambda *pool: given_back.append(pool))
    monkeypatch.setattr(memory, "empty_host_cache", lambda: emptied.append(None))
    memory._Held(0, (0, 1))
    # The share of the device's memory that the first try took is given back.
    assert emptied == [None] and given_back == [(0, (0, 1))] * 2
