"""Streams to capture on are graphrt's own: no other pool and no other thread has one."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from graphrt import GraphOptions, GraphPool, GraphRunner, InputSpec

pytestmark = pytest.mark.cuda

SPEC = {"x": InputSpec(torch.float32, ("tokens", 64))}


def runner(forward: Any, pool: GraphPool, mode: str = "FULL", **options: Any) -> GraphRunner:
    return GraphRunner(
        forward,
        mode=mode,
        sizes=[2, 4],
        inputs=SPEC,
        outputs=("tokens", 64),
        pool=pool,
        options=GraphOptions(**options),
    )


def of_torch() -> list[torch.cuda.Stream]:
    """More than torch has, of both priorities."""
    return [torch.cuda.Stream(priority=priority) for priority in (0, -1) for _ in range(40)]


def test_33_pools_have_33_streams_outside_of_torchs_stream_pool():
    pools = [GraphPool("cuda") for _ in range(33)]
    handles = {pool.stream.cuda_stream for pool in pools}
    assert len(handles) == 33
    assert not handles & {stream.cuda_stream for stream in of_torch()}
    for pool in pools:
        pool.close()


def test_a_capture_stream_is_reused_only_after_its_pool_is_closed():
    gc.collect()
    pool = GraphPool("cuda")
    handle = pool.stream.cuda_stream
    others = [GraphPool("cuda") for _ in range(4)]
    assert handle not in {other.stream.cuda_stream for other in others}
    with runner(lambda x: x @ x.T @ x, pool) as run:
        run.capture()
    pool.close()
    gc.collect()
    lent = [GraphPool("cuda") for _ in range(64)]
    (again,) = (each for each in lent if each.stream.cuda_stream == handle)
    with runner(lambda x: x @ x.T @ x, again) as run:
        run.capture()
        x = torch.randn(4, 64)
        assert torch.allclose(run(x=x).cpu(), x @ x.T @ x, rtol=1e-2, atol=1e-1)
    for each in (*lent, *others):
        each.close()


def test_a_capture_stream_stays_reserved_while_its_graphs_live():
    pool, host = GraphPool("cuda"), torch.cuda.Stream()
    handle = pool.stream.cuda_stream
    with runner(lambda x: x * 2, pool) as run:
        run.capture()
        with pool.capture_session(stream=host):
            pass
        gc.collect()
        assert pool.stream == host
        other = GraphPool("cuda")
        assert other.stream.cuda_stream != handle
        assert torch.equal(run(x=torch.ones(3, 64)).cpu(), torch.full((3, 64), 2.0))
    other.close()
    pool.close()


def test_a_pool_uses_the_stream_the_host_passed():
    host = torch.cuda.Stream()
    pool = GraphPool("cuda", stream=host)
    assert pool.stream is host
    pool.close()


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_work_of_another_thread_on_new_streams_is_not_captured(mode):
    beside: list[torch.Tensor] = []

    def work() -> None:
        streams = of_torch()
        for stream in streams:
            with torch.cuda.stream(stream):
                beside.append(torch.full((4096,), 5.0, device="cuda").add_(1))
        for stream in streams:
            stream.synchronize()

    def forward(x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            with ThreadPoolExecutor(1) as thread:
                thread.submit(work).result()
        return (x + 1) * (x + 2)

    pool = GraphPool("cuda")
    with runner(forward, pool, mode, check="off") as run:
        run.capture()
        assert beside
        for each in beside:
            assert torch.equal(each.cpu(), torch.full((4096,), 6.0))
            each.fill_(7)
        for value in (1.0, 2.0, 3.0):
            x = torch.full((4, 64), value)
            assert torch.equal(run(x=x).cpu(), (x + 1) * (x + 2))
        for each in beside:
            assert torch.equal(each.cpu(), torch.full((4096,), 7.0))
    pool.close()


def test_record_stream_keeps_memory_until_graphrts_stream_is_done():
    pool = GraphPool("cuda")
    for _ in range(3):
        x = torch.ones(1 << 20, device="cuda")
        pool.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(pool.stream):
            torch.cuda._sleep(20_000_000)
            y = x + 1
        x.record_stream(pool.stream)
        del x
        other = torch.full((1 << 20,), 9.0, device="cuda")
        torch.cuda.current_stream().wait_stream(pool.stream)
        assert y.sum().item() == 2 * (1 << 20)
        del other, y
    pool.close()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
