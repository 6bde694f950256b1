"""A host's own ACL graphs beside graphrt's, in one allocator pool."""

from __future__ import annotations

import gc
import types
from typing import Any

import pytest
import torch

from graphrt import GraphPool, KeyedGraphs, WrapperTrials
from graphrt.core.base.errors import InvalidOptionError, PoolError
from graphrt.errors import GraphQuarantinedWarning

pytestmark = pytest.mark.npu


@pytest.fixture
def npu() -> Any:
    return torch.npu  # type: ignore[attr-defined]


def stream_of_host(npu: Any) -> Any:
    """One that is not also the stream on which graphrt updates tasks: torch has 32, in turn."""
    for _ in range(32):
        stream = npu.Stream()
        try:
            GraphPool(stream=stream).close()
        except InvalidOptionError:
            continue
        return stream
    raise AssertionError("every stream is refused")


def captured_by_host(npu: Any, forward: Any, handle: Any, stream: Any) -> tuple[Any, torch.Tensor]:
    graph = npu.NPUGraph()
    with npu.graph(graph, pool=handle, stream=stream):
        out = forward()
    return graph, out


@pytest.mark.parametrize("adopted", [False, True])
def test_host_graphs_and_pool_graphs_share_memory_without_freeing_each_other(npu, adopted):
    stream = stream_of_host(npu)
    adopted_handle = npu.graph_pool_handle() if adopted else None
    pool = GraphPool(handle=adopted_handle, stream=stream)
    handle = pool.handle
    assert handle == adopted_handle or not adopted
    x = torch.ones(4, 8, device="npu")
    keyed = KeyedGraphs(pool)
    keyed.capture("one", lambda: x + 1)
    host, out = captured_by_host(npu, lambda: x + 10, handle, pool.stream)
    keyed.capture("two", lambda: x + 2)
    for value in (3.0, 4.0):
        x.fill_(value)
        host.replay()
        assert out.sum().item() == 32 * (value + 10)
        assert keyed.replay("one").sum().item() == 32 * (value + 1)
        assert keyed.replay("two").sum().item() == 32 * (value + 2)
    pool.clear_graphs()
    assert pool.handle == handle
    keyed.capture("one", lambda: x + 5)
    pool.close()
    gc.collect()
    npu.empty_cache()
    junk = [torch.full((1 << 18,), 7.0, device="npu") for _ in range(16)]
    x.fill_(5.0)
    host.replay()
    assert out.sum().item() == 32 * 15
    assert all(bool((tensor == 7).all()) for tensor in junk)


def test_a_pool_handle_with_live_memory_but_no_graphs_is_refused(npu):
    handle, x = npu.graph_pool_handle(), torch.ones(4, device="npu")
    host, out = captured_by_host(npu, lambda: x + 1, handle, npu.Stream())
    host.replay()
    host.reset()
    with pytest.raises(PoolError, match="cannot be entered"):
        GraphPool(handle=handle)
    assert out.tolist() == [2.0] * 4
    other = KeyedGraphs(GraphPool())
    assert other.capture("key", lambda: x + 3).replay().tolist() == [4.0] * 4
    other.pool.close()


def test_trials_of_keyed_graphs_find_a_changed_number(npu):
    x, held = torch.ones(4, device="npu"), types.SimpleNamespace(scale=2.0)
    keyed = KeyedGraphs(GraphPool(), trials=WrapperTrials)
    keyed.capture("key", lambda: x * held.scale)

    def found(value):
        x.fill_(value)
        return keyed.replay("key").tolist() == [value * held.scale] * 4

    assert all(found(value) for value in (1.0, 2.0, 3.0))
    held.scale = 5.0
    with pytest.warns(GraphQuarantinedWarning, match="scale"):
        # On Python up to 3.11 some steps late.
        right = [found(float(value)) for value in range(40)]
    assert all(right[-5:]) and keyed["key"].trials.records[0].status == "quarantined"
    keyed.drop("key")
    keyed.capture("key", lambda: x * held.scale)
    assert all(found(value) for value in (1.0, 2.0, 3.0))
    keyed.pool.close()


def test_invalid_streams_and_pool_handles_are_refused(npu):
    for wrong in ({"stream": npu.default_stream()}, {"stream": 1}, {"handle": (0, 0)}):
        with pytest.raises(InvalidOptionError):
            GraphPool(**wrong)
