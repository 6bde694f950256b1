"""A stream that graphrt captures on is no other pool's, and no other thread's."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from schedules import need_simulator, python

from graphrt import GraphOptions, GraphPool, GraphRunner, InputSpec
from graphrt.ascend.driver.library import available_streams

pytestmark = pytest.mark.npu

PLATFORM = os.environ.get("GRAPHRT_PLATFORM", "ascend")
SPEC = {"x": InputSpec(torch.float32, ("tokens", 8))}


def drawn(count: int = 100) -> set[int]:
    return {torch.npu.Stream().stream_id for _ in range(count)}


def test_pool_streams_are_never_handed_out_by_torch_npu_again():
    gc.collect()
    pools = [GraphPool(PLATFORM) for _ in range(8)]
    own = {pool.stream.stream_id for pool in pools}
    assert len(own) == 8
    with ThreadPoolExecutor(1) as thread:
        streams = drawn() | thread.submit(drawn).result()
    assert not own & streams and len(streams) > 1
    # A stream that there is is found by its number still.
    with torch.npu.stream(pools[0].stream):
        assert torch.npu.current_stream() == pools[0].stream
    for pool in pools:
        pool.close()


def test_a_closed_pools_stream_is_reused_and_takes_no_device_stream():
    pools = [GraphPool(PLATFORM)]
    before = available_streams()
    seen = set()
    for _ in range(40):
        pool = GraphPool(PLATFORM)
        assert pool.stream != pools[0].stream
        seen.add(pool.stream.stream_id)
        pool.close()
    assert len(seen) < 17 and available_streams() == before
    pools[0].close()


def test_pools_beyond_the_number_of_streams_share_graphrts_streams():
    pools = [GraphPool(PLATFORM) for _ in range(33)]
    own = {pool.stream.stream_id for pool in pools}
    assert 8 <= len(own) <= 16
    assert not own & drawn()
    for pool in pools:
        pool.close()


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_work_of_another_thread_on_new_streams_is_not_captured(mode):
    beside: list[torch.Tensor] = []

    def work() -> None:
        for _ in range(40):
            with torch.npu.stream(torch.npu.Stream()):
                beside.append(torch.full((64,), 5.0, device="npu").add_(1))

    def forward(x: torch.Tensor) -> torch.Tensor:
        if torch.npu.is_current_stream_capturing():
            with ThreadPoolExecutor(1) as thread:
                thread.submit(work).result()
        return (x + 1) * (x + 2)

    pool = GraphPool(PLATFORM)
    with GraphRunner(
        forward,
        mode=mode,
        sizes=[2, 4],
        inputs=SPEC,
        outputs=("tokens", 8),
        pool=pool,
        options=GraphOptions(check="off"),
    ) as run:
        run.capture()
        torch.npu.synchronize()
        assert beside and all((each.cpu() == 6).all() for each in beside)
        for each in beside:
            each.fill_(7)
        for value in (1.0, 2.0, 3.0):
            x = torch.full((4, 8), value)
            assert torch.equal(run(x=x).cpu(), (x + 1) * (x + 2))
        assert all((each.cpu() == 7).all() for each in beside)
    pool.close()


@pytest.mark.parametrize("before_updates", [True, False], ids=["made before", "made after"])
@pytest.mark.parametrize("waits", [True, False], ids=["behind the steps", "in no order"])
def test_work_of_another_thread_on_new_streams_comes_into_no_update(before_updates, waits):
    need_simulator()
    called = f"before_updates={before_updates}, waits={waits}"
    code = f"import protocol; protocol.beside_new_streams({called}); print('right')"
    out = python(code, schedule="random:3", hang_ms=5000)
    assert out.splitlines()[-1] == "right"
