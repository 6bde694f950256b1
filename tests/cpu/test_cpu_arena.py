from __future__ import annotations

import gc
import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrt.core.base.errors import GraphRTError, PoolClosedError, ResourceExhaustedError
from graphrt.cpu import Arena


def block(arena: Arena, nbytes: int) -> torch.Tensor:
    return arena.empty_strided((nbytes,), (1,), torch.uint8)


def test_a_dropped_block_is_used_by_the_next_allocation():
    arena = Arena()
    first = block(arena, 100)
    address = first.data_ptr()
    del first
    assert block(arena, 100).data_ptr() == address


def test_a_view_keeps_the_block_of_its_base():
    arena = Arena()
    base = block(arena, 100)
    view, address = base[10:20], base.data_ptr()
    del base
    assert block(arena, 100).data_ptr() != address
    del view
    assert arena.live_bytes == 0


def test_an_alias_keeps_memory_readable_but_frees_the_block_for_reuse():
    arena = Arena()
    tensor = arena.empty_strided((3, 4), (1, 3), torch.float32).fill_(2.0)
    alias = arena.alias(tensor[1:, 1:])
    assert (alias.data_ptr(), alias.stride()) == (tensor[1:, 1:].data_ptr(), (1, 3))
    del tensor
    assert arena.live_bytes == 0
    arena.release()
    del arena
    gc.collect()
    assert alias.eq(2.0).all()


def test_neighbouring_free_blocks_are_merged():
    arena = Arena(max_bytes=4096)
    blocks = [block(arena, 1024) for _ in range(4)]
    start = blocks[0].data_ptr()
    del blocks[0], blocks[1], blocks[0], blocks[0]
    assert block(arena, 4096).data_ptr() == start


def test_blocks_are_aligned_and_strides_are_kept():
    arena = Arena()
    for dtype in (torch.bool, torch.bfloat16, torch.complex128):
        tensor = arena.empty_strided((5, 3), (1, 7), dtype)
        assert tensor.data_ptr() % 64 == 0
        assert tensor.stride() == (1, 7)


def test_a_tensor_without_elements_needs_no_memory():
    arena = Arena()
    tensor = arena.empty_strided((0, 4), (4, 1), torch.float32)
    assert tensor.shape == (0, 4)
    assert arena.reserved_bytes == 0


def test_growth_beyond_the_limit_names_asked_held_and_limit():
    arena = Arena(max_bytes=1 << 20)
    held = block(arena, 900_000)
    with pytest.raises(
        ResourceExhaustedError, match=r"(?s)200000 bytes asked, 900032 held.*1048576"
    ):
        block(arena, 200_000 - 200_000 % 64)
    assert held.numel() == 900_000


def test_growing_does_not_move_a_block():
    arena = Arena()
    first = block(arena, 1000).fill_(7)
    address = first.data_ptr()
    more = [block(arena, 1 << 20) for _ in range(3)]
    assert len(more) == 3
    assert first.data_ptr() == address
    assert first.eq(7).all()


def test_a_released_arena_refuses_and_its_tensors_stay_readable():
    arena = Arena()
    tensor = block(arena, 64).fill_(3)
    arena.release()
    assert arena.reserved_bytes == 0
    assert tensor.eq(3).all()
    with pytest.raises(PoolClosedError):
        block(arena, 64)


def test_an_arena_owns_and_aliases_only_its_own_tensors():
    arena, foreign = Arena(), torch.ones(3)
    mine = block(arena, 64)
    assert arena.owns(mine[3:])
    assert not arena.owns(foreign)
    with pytest.raises(GraphRTError, match="does not live in this arena"):
        arena.alias(foreign)


def test_blocks_may_be_dropped_by_other_threads_and_by_the_collector():
    arena = Arena()

    def churn() -> None:
        for i in range(300):
            cycle: list[object] = [block(arena, 64 + i)]
            cycle.append(cycle)

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert arena.live_bytes == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5000)), max_size=80))
def test_live_blocks_never_overlap_and_all_memory_comes_back(steps):
    arena = Arena()
    held: list[torch.Tensor] = []
    for drop, number in steps:
        if drop and held:
            del held[number % len(held)]
        else:
            held.append(block(arena, number))
        spans = sorted((t.data_ptr(), t.data_ptr() + t.numel()) for t in held)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert arena.live_bytes == sum(-(-t.numel() // 64) * 64 for t in held)
    held.clear()
    assert arena.live_bytes == 0
    assert len(arena._free) == len(arena._chunks)
