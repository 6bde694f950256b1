"""A host's own CUDA graphs beside graphrt's: memory, streams and workspaces that both use."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from graphrt import (
    BatchDescriptor,
    ForwardContext,
    GraphMode,
    GraphOptions,
    GraphPool,
    KeyedGraphs,
    eager_break,
    wrapper_class,
)
from graphrt.core.base.errors import CaptureError, InvalidOptionError, PoolError
from graphrt.core.device.registry import get_platform
from graphrt.cuda.blocks import workspace_sizes

pytestmark = pytest.mark.cuda

WIDTH = 512


def captured_by_host(forward: Any, pool: Any, stream: torch.cuda.Stream) -> Any:
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        out = forward()
    return graph, out


def workspaces(pool: GraphPool | None = None) -> set[int]:
    """Addresses of blocks in use that have the size of a workspace: of a pool, or of none."""
    own = (0, 0) if pool is None else tuple(pool.handle)
    return {
        block["address"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) == own
        for block in segment["blocks"]
        if block["state"] == "active_allocated" and block["requested_size"] in workspace_sizes()
    }


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def matrix() -> torch.Tensor:
    return torch.randn(WIDTH, WIDTH, device="cuda") / WIDTH**0.5


@pytest.fixture(autouse=True)
def cublas_is_set_up() -> None:
    """As a host's warm-up leaves it."""
    matrix() @ matrix()


def junk() -> list[torch.Tensor]:
    """What takes memory that somebody wrongly gave back."""
    return [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(64)]


@pytest.mark.parametrize("whose", ["the host's", "graphrt's", "a MemPool's"])
def test_host_graphs_and_pool_graphs_share_memory_without_freeing_each_other(whose):
    stream = torch.cuda.Stream()
    mem_pool = torch.cuda.MemPool() if whose == "a MemPool's" else None
    if whose == "graphrt's":
        pool = GraphPool(stream=stream)
        handle = pool.handle
    else:
        handle = torch.cuda.graph_pool_handle() if mem_pool is None else mem_pool.id
        pool = GraphPool(handle=handle, stream=stream)
    x, weight = torch.ones(8, WIDTH, device="cuda"), matrix()
    keyed = KeyedGraphs(pool)
    keyed.capture("before", lambda: (x @ weight).relu() @ weight)
    host, *outputs = captured_by_host(lambda: (x @ weight) @ weight, handle, pool.stream)
    keyed.capture("after", lambda: (x @ weight).sigmoid() @ weight)

    def both(value: float) -> None:
        x.fill_(value)
        host.replay()
        same(outputs[0], (x @ weight) @ weight)
        if not pool.closed:
            same(keyed.replay("before"), (x @ weight).relu() @ weight)
            same(keyed.replay("after"), (x @ weight).sigmoid() @ weight)

    for value in (1.0, 2.0):
        both(value)
    keyed.drop("before")
    keyed.capture("before", lambda: (x @ weight).relu() @ weight)
    both(3.0)
    pool.close()
    gc.collect()
    torch.cuda.empty_cache()
    kept = junk()
    for value in (4.0, 5.0):
        both(value)
        assert all(bool((tensor == 7).all()) for tensor in kept)
    # And the other way round: the host's graphs go first.
    pool = GraphPool(handle=handle, stream=stream)
    keyed = KeyedGraphs(pool)
    keyed.capture("alone", lambda: (x @ weight).relu())
    host.reset()
    outputs.clear()
    torch.cuda.empty_cache()
    kept = junk()
    x.fill_(6.0)
    same(keyed.replay("alone"), (x @ weight).relu())
    assert all(bool((tensor == 7).all()) for tensor in kept)
    pool.close()


def test_a_pool_handle_stays_valid_between_captures_without_growing_memory():
    pool, x = GraphPool(), torch.ones(64, WIDTH, device="cuda")
    handle, seen = pool.handle, []
    keyed = KeyedGraphs(pool)
    for _ in range(4):
        keyed.capture("key", lambda: torch.cat([x, x]) @ x.T)
        same(keyed.replay("key"), torch.cat([x, x]) @ x.T)
        pool.clear_graphs()
        assert pool.handle == handle
        host, out = captured_by_host(lambda: x + 1, handle, pool.stream)
        host.replay()
        assert bool((out == 2).all())
        del host, out
        seen.append(pool.bytes())
    assert seen[1:] == seen[1:2] * 3
    pool.close()


def test_a_pool_handle_with_live_memory_but_no_graphs_is_refused():
    handle, x = torch.cuda.graph_pool_handle(), torch.ones(4, device="cuda")
    host, out = captured_by_host(lambda: x + 1, handle, torch.cuda.Stream())
    host.replay()
    host.reset()
    with pytest.raises(PoolError, match="cannot be entered"):
        GraphPool(handle=handle)
    assert out.tolist() == [2.0] * 4
    # Whatever it was, random numbers, captures and allocations go on.
    assert torch.randn(4, device="cuda").isfinite().all()
    other = GraphPool()
    assert KeyedGraphs(other).capture("key", lambda: x + 3).replay().tolist() == [4.0] * 4
    other.close()


def test_a_mem_pool_is_adopted_again_after_its_last_graph():
    mem_pool, stream = torch.cuda.MemPool(), torch.cuda.Stream()
    x, weight = torch.ones(8, WIDTH, device="cuda"), matrix()
    for value in (1.0, 2.0, 3.0):
        pool = GraphPool(handle=mem_pool.id, stream=stream)
        keyed = KeyedGraphs(pool)
        keyed.capture("key", lambda: (x @ weight).relu())
        x.fill_(value)
        same(keyed.replay("key"), (x @ weight).relu())
        pool.close()


@pytest.mark.parametrize("stream", [object(), None])
def test_streams_that_cannot_be_captured_on_are_refused(stream):
    with pytest.raises(InvalidOptionError):
        GraphPool(stream=torch.cuda.default_stream() if stream is None else stream)


def test_pieces_captured_in_a_session_on_the_hosts_stream_equal_eager():
    stream, pool = torch.cuda.Stream(), GraphPool()
    context = ForwardContext(GraphMode.PIECEWISE, BatchDescriptor(8))
    weights = [matrix() for _ in range(6)]
    pieces = [
        wrapper_class(get_platform("cuda"))(
            lambda x, weight=weight: [(x @ weight).relu()],
            "PIECEWISE",
            pool=pool,
            read_context=lambda: context,
            options=GraphOptions(lazy=True),
        )
        for weight in weights
    ]
    x = torch.randn(8, WIDTH, device="cuda")

    def forward(pieces: Any) -> torch.Tensor:
        hidden = x
        for piece in pieces:
            (hidden,) = piece(hidden)
        return hidden

    eager = [lambda x, weight=weight: [(x @ weight).relu()] for weight in weights]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward(eager)
        with pool.capture_session(stream=stream) as session:
            context.begin_step()
            forward(pieces)
    torch.cuda.current_stream().wait_stream(stream)
    assert session.captures == 6 and all(piece.sealed for piece in pieces)
    for _ in range(5):
        x.normal_()
        context.begin_step()
        same(forward(pieces), forward(eager))
    pool.close()


# Workspaces -------------------------------------------------------------------------------------


def test_a_capture_session_allocates_a_single_cublas_workspace():
    pool, x = GraphPool(), torch.randn(64, WIDTH, device="cuda")
    weight = matrix()
    nothing = eager_break(lambda y: None)

    def broken(y: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            y = torch.cat([y, y]) @ weight
            nothing(y)
            nothing(y)  # between the two an empty segment
        return y

    x @ weight
    context = ForwardContext(GraphMode.PIECEWISE, BatchDescriptor(64))
    options = GraphOptions(lazy=True)
    wrap = wrapper_class(get_platform("cuda"))
    wrappers = [
        wrap(
            broken,
            "PIECEWISE",
            pool=pool,
            read_context=lambda: context,
            options=options,
            breakable=True,
        )
        for _ in range(4)
    ]
    keyed = KeyedGraphs(pool)
    with pool.capture_session():
        for place, wrapper in enumerate(wrappers):
            context.begin_step()
            wrapper(x)
            with pytest.raises(CaptureError):
                keyed.capture("fails", lambda: (x @ weight).sum().item())
            keyed.capture(place, lambda: x @ weight)
            if place % 2:
                keyed.drop(place)
    assert len(workspaces(pool)) <= 1
    for wrapper in wrappers:
        x.normal_()
        context.begin_step()
        same(wrapper(x), broken(x))
    pool.close()


def test_the_cublas_workspace_of_live_graphs_is_never_freed():
    pool, x = GraphPool(), torch.randn(64, WIDTH, device="cuda")
    weight = matrix()
    x @ weight
    keyed = KeyedGraphs(pool)
    for key in range(4):
        keyed.capture(key, lambda: (x @ weight) @ weight)
    before = workspaces(pool)
    for key in range(3):
        keyed.drop(key)
        with pytest.raises(CaptureError):
            keyed.capture("fails", lambda: (x @ weight).sum().item())
        others = [KeyedGraphs(GraphPool()) for _ in range(3)]
        for other in others:
            other.capture("key", lambda: x @ weight)
            other.pool.close()
        assert before <= workspaces(pool)
    same(keyed.replay(3), (x @ weight) @ weight)
    pool.close()


def test_the_cublas_workspace_of_host_graphs_outside_of_pools_is_not_freed():
    stream, x = torch.cuda.Stream(), torch.randn(64, WIDTH, device="cuda")
    weight = matrix()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x @ weight  # the host's warm-up: its workspace lies in no pool
    torch.cuda.synchronize()
    before = workspaces()
    host, out = captured_by_host(lambda: (x @ weight) @ weight, None, stream)
    pool = GraphPool(stream=stream)
    keyed = KeyedGraphs(pool)
    for key in range(3):
        keyed.capture(key, lambda: (x @ weight) @ weight)
    assert not workspaces(pool), "it is shared with the host's"
    keyed.drop(0)
    assert before <= workspaces()
    pool.clear_graphs()
    assert before <= workspaces()
    pool.close()
    assert before <= workspaces()
    kept = junk()
    host.replay()
    same(out, (x @ weight) @ weight)
    assert all(bool((tensor == 7).all()) for tensor in kept)


def test_each_pool_captures_on_a_stream_of_its_own():
    pools = [GraphPool() for _ in range(12)]
    assert len({pool.stream.cuda_stream for pool in pools}) == 12
