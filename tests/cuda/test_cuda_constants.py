"""What constants of a forward cost a GPU's captures, and what they leave; the conformance suite and
tests/trust/test_constants.py have what they do."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from graphrt import (
    BatchDescriptor,
    ForwardContext,
    GraphMode,
    GraphOptions,
    GraphRunner,
    InputSpec,
    KeyedGraphs,
    Plan,
    wrapper_class,
)
from graphrt import current_platform as platform
from graphrt.core.base.torch_names import is_made_on_host
from graphrt.core.capture.guard import CaptureGuard
from graphrt.errors import BakedScalarError, CaptureSyncError, PageableCopyError, RefusedOpError

pytestmark = pytest.mark.cuda


def prototype(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    low = torch.tensor(-3.0, device=x.device)
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)
    masked = torch.where(mask, torch.tensor(0.0, device=x.device, dtype=x.dtype), low)
    return x * weights + masked + x[:, [-2]] + torch.full((1,), 7.0).to(x.device)


def use_pinned_memory() -> None:
    """Whatever was given back has other bytes afterwards."""
    torch.cuda.synchronize()
    buffers = [
        torch.empty(size, dtype=torch.uint8, pin_memory=True)
        for size in (1, 4, 8, 16, 32, 256)
        for _ in range(16)
    ]
    for buffer in buffers:
        buffer.fill_(0xEE)


def runner_of(forward: Any, mode: str = "FULL") -> GraphRunner:
    return GraphRunner(
        forward,
        Plan(mode=mode, sizes=[4]),
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
    )


def test_fifty_replays_with_baked_in_host_constants_equal_eager() -> None:
    x = torch.randn(8, 4, device="cuda")
    mask = torch.rand(8, 4, device="cuda") > 0.5
    graph = KeyedGraphs().capture(1, lambda: prototype(x, mask))
    use_pinned_memory()
    for _ in range(50):
        x.copy_(torch.randn(8, 4))
        mask.copy_(torch.rand(8, 4) > 0.5)
        assert torch.equal(graph.replay(), prototype(x, mask))


def test_pinned_memory_made_by_the_forward_is_kept_for_replays() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([2.0] * 4).pin_memory().to(x.device, non_blocking=True)

    runner = runner_of(forward)
    runner.capture()
    use_pinned_memory()
    x = torch.randn(4, 4, device="cuda")
    assert torch.equal(runner(x=x), x * 2)
    assert runner.last_dispatch.reason.name == "HIT"


def test_verify_names_the_line_of_a_changed_constant() -> None:
    class Scaled(torch.nn.Module):
        scale = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.tensor(self.scale, device=x.device)  # the line

    model = Scaled()
    runner = runner_of(model)
    runner.capture()
    x = torch.randn(4, 4, device="cuda")
    runner(x=x)
    model.scale = 3.0
    with pytest.raises(BakedScalarError, match="# the line"):
        runner.verify(x=x)


def test_host_tensors_that_are_no_constants_are_refused_at_capture() -> None:
    table = torch.ones(4)
    x = torch.ones(4, 4, device="cuda")
    graphs = KeyedGraphs()
    with pytest.raises(PageableCopyError, match=r"test_cuda_constants\.py"):
        graphs.capture(1, lambda: x * table.to(x.device))
    with pytest.raises(CaptureSyncError):
        graphs.capture(1, lambda: x * x.cpu().to(x.device))
    assert not is_made_on_host()
    assert torch.equal(graphs.capture(1, lambda: x[:, [1]] * 2).replay(), x[:, [1]] * 2)


def test_two_threads_capture_constants_and_the_host_flag_is_restored() -> None:
    failed: list[BaseException] = []

    # Not drawn in the threads: torch refuses random numbers of a device while any thread captures.
    x = torch.randn(8, 4, device="cuda")

    def work() -> None:
        try:
            mask = x > 0
            graphs = KeyedGraphs()
            for key in range(20):
                graph = graphs.capture(key, lambda: prototype(x, mask))
                assert torch.equal(graph.replay(), prototype(x, mask))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert not is_made_on_host()


def test_a_forward_runs_a_second_capture_only_if_constants_were_made() -> None:
    calls = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.cuda.is_current_stream_capturing())
        return x * 2

    runner = runner_of(forward)
    runner.capture()
    assert calls.count(True) == 1
    calls.clear()
    runner = runner_of(lambda x: forward(x) + torch.tensor(1.0, device=x.device))
    runner.capture()
    assert calls.count(True) == 2


class Looks:
    """How many operators the guard of captures has handled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        handle = CaptureGuard.handle

        def counted(*args: Any) -> Any:
            self.count += 1
            return handle(*args)

        monkeypatch.setattr(CaptureGuard, "handle", counted)

    def taken(self) -> int:
        count, self.count = self.count, 0
        return count


class Kind:
    """Names a kind of graphs."""


def test_operators_are_looked_at_for_the_first_graph_of_a_kind_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, graphs, kind = Looks(monkeypatch), KeyedGraphs(), Kind()
    x = torch.randn(8, 4, device="cuda")
    captured = {}
    for size in (8, 4, 2):
        captured[size] = graphs.capture(size, lambda size=size: x[:size] * 2 + 1, kind=kind)
        assert bool(looks.taken()) == (size == 8)
    graphs.capture("another", lambda: x * 3)
    assert looks.taken()
    for size, graph in captured.items():
        assert torch.equal(graph.replay(), x[:size] * 2 + 1)


def test_a_later_graph_of_a_kind_may_be_the_first_with_constants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, graphs, kind = Looks(monkeypatch), KeyedGraphs(), Kind()
    x = torch.randn(8, 4, device="cuda")

    def small() -> torch.Tensor:
        return x[:2] * torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda")

    graphs.capture(8, lambda: x * 2, kind=kind)
    looks.taken()
    graph = graphs.capture(2, small, kind=kind)
    assert looks.taken()
    use_pinned_memory()
    for _ in range(5):
        x.copy_(torch.randn(8, 4))
        assert torch.equal(graph.replay(), small())
    graphs.capture(4, lambda: x[:4] * 2, kind=kind)
    assert looks.taken()


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), lambda: torch.rand(4).pin_memory()])
def test_a_later_graph_of_a_kind_that_draws_on_the_host_is_refused(draw: Any) -> None:
    graphs, kind = KeyedGraphs(), Kind()
    x = torch.randn(8, 4, device="cuda")
    graphs.capture(8, lambda: x * 2, kind=kind)
    with pytest.raises(RefusedOpError, match="drawn on the host"):
        graphs.capture(2, lambda: x[:2] * draw().to("cuda", non_blocking=True), kind=kind)
    graph = graphs.capture(2, lambda: x[:2] * 2, kind=kind)
    assert torch.equal(graph.replay(), x[:2] * 2)


def test_sizes_of_a_wrapper_are_looked_at_until_one_used_nothing_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = Looks(monkeypatch)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if len(x) > 2 else x * torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda")

    wrapper = wrapper_class(platform())(forward, "FULL", options=GraphOptions(lazy=True))
    x = torch.randn(8, 4, device="cuda")
    seen = {}
    with wrapper.pool.capture_session():
        for size in (8, 4, 2, 1):
            with ForwardContext(GraphMode.FULL, BatchDescriptor(size)):
                wrapper(x[:size])
            seen[size] = bool(looks.taken())
    assert seen == {8: True, 4: False, 2: True, 1: True}
    for size in (8, 4, 2, 1):
        x.copy_(torch.randn(8, 4))
        with ForwardContext(GraphMode.FULL, BatchDescriptor(size)):
            assert torch.equal(wrapper(x[:size]), forward(x[:size]))
