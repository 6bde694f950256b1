"""The kernel that fetches inputs, thread by thread on the CPU, against the contract in Python."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx import Kernel

from graphrt.cuda.driver._fetch_ptx import PTX, THREADS
from graphrt.cuda.ring.format import RingFormat
from tests.core.soft_ring import SoftRing

KERNEL = Kernel(PTX.decode())
NBYTES, MOVES, SLOTS = 6000, 12, 3
WIDE = NBYTES + -NBYTES % 256


class Both:
    """The same ring twice: one is fetched by the kernel, one as the contract says."""

    def __init__(self) -> None:
        self.slabs = [aligned(WIDE), aligned(WIDE)]
        self.rings = [SoftRing(slab, SLOTS, NBYTES, MOVES) for slab in self.slabs]
        for ring in self.rings:
            ring.memory = aligned(ring.memory.nbytes)
        self.counter = aligned(RingFormat.COUNTER_BYTES)
        self.rings[0].counter = ctypes.c_uint64.from_address(self.counter.data_ptr())
        for slab in self.slabs:
            slab.random_(256, generator=torch.Generator().manual_seed(1))

    def write(self, slot: int, number: int, count: int, moves: list[int], payload: torch.Tensor):
        for ring in self.rings:
            start = RingFormat.CONTROL_BYTES + slot * ring.stride
            words = ring.memory[start : start + ring.payload].view(torch.int64)
            head = [number, count, *moves]
            words[: len(head)] = torch.tensor([signed(word) for word in head])
            ring.memory[start + ring.payload :][: payload.nbytes] = payload

    def fetch(self, nbytes: int, blocks: int, order: random.Random) -> None:
        kernel, ring = self.rings
        control = kernel.memory.data_ptr()
        slab = self.slabs[0]
        values = (
            control + RingFormat.CONTROL_BYTES,
            slab.data_ptr(),
            self.counter.data_ptr(),
            control,
            SLOTS,
            kernel.stride,
            kernel.payload,
            RingFormat.FIRST_MOVE + RingFormat.MOVE_WORDS * MOVES,
            -(-nbytes // 16),
        )
        KERNEL.launch(order.sample(range(blocks), blocks), blocks, THREADS, values)
        ring.fetch(nbytes, MOVES)

    def check(self) -> None:
        ours, theirs = (ring.memory[: RingFormat.CONTROL_BYTES] for ring in self.rings)
        assert torch.equal(ours, theirs)
        assert torch.equal(*self.slabs), (self.slabs[0] != self.slabs[1]).nonzero().flatten()[:8]


def aligned(nbytes: int) -> torch.Tensor:
    buffer = torch.zeros(nbytes + 256, dtype=torch.uint8)
    start = -buffer.data_ptr() % 256
    return buffer[start : start + nbytes]


def signed(word: int) -> int:
    return ctypes.c_int64(word).value


@st.composite
def fills(draw, unit: int = 1) -> list[int]:
    """Spans that lie apart from each other, and their patterns."""
    words, at = [], 0
    for _ in range(draw(st.integers(0, MOVES))):
        at += draw(st.integers(0, 40)) * unit
        size = draw(st.one_of(st.integers(1, 30), st.just(300))) * unit
        if at + size > NBYTES:
            break
        words += [at, draw(st.integers(0, (1 << 64) - 1)), size, RingFormat.FILL]
        at += size
    return words


@settings(max_examples=15)
@given(
    st.integers(0, NBYTES), st.integers(1, 2), st.one_of(fills(), fills(4), fills(8)), st.randoms()
)
def test_the_fetch_kernel_copies_a_whole_payload_and_fills_padding(nbytes, blocks, moves, order):
    both = Both()
    payload = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8)
    moves = [
        word
        for at in range(0, len(moves), 4)
        if moves[at] + moves[at + 2] <= nbytes
        for word in moves[at : at + 4]
    ]
    both.write(0, 0, RingFormat.WHOLE + len(moves) // 4, moves, payload)
    both.fetch(nbytes, blocks, order)
    both.check()
    assert both.rings[0].counter.value == 1


@st.composite
def any_moves(draw, source: int) -> list[int]:
    """Moves of every kind and alignment, `source` being memory that any may read."""
    words, at = [], 0
    for _ in range(draw(st.integers(0, MOVES))):
        unit = draw(st.sampled_from([1, 2, 4, 8, 16]))
        at = -(-at // unit) * unit + draw(st.integers(0, 8)) * unit
        # 300 are more than one block moves in one round.
        size = draw(st.one_of(st.integers(1, 24), st.just(300))) * unit
        if at + size > NBYTES:
            break
        kind = draw(st.sampled_from([RingFormat.COPY, RingFormat.PAYLOAD, RingFormat.FILL]))
        start = draw(st.integers(0, 16)) * unit
        period = draw(st.sampled_from([size, unit, 2 * unit, 3 * unit]))
        if kind == RingFormat.FILL:
            words += [at, draw(st.integers(0, (1 << 64) - 1)), size, kind]
        else:
            begin = source + start if kind == RingFormat.COPY else start
            words += [at, begin, size, kind | period << 8]
        at += size
    return words


SOURCE = aligned(4096).random_(256)


@settings(max_examples=15)
@given(st.integers(1, 2), any_moves(SOURCE.data_ptr()), st.randoms())
def test_fetch_moves_copy_repeat_and_fill_only_their_own_bytes(blocks, moves, order):
    both = Both()
    payload = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8)
    both.write(0, 0, len(moves) // 4, moves, payload)
    both.fetch(NBYTES, blocks, order)
    both.check()


@pytest.mark.parametrize("found", [4, RingFormat.NO_STEP])
def test_a_ring_slot_of_another_step_is_not_copied_and_sets_the_error(found):
    both = Both()
    before = both.slabs[0].clone()
    both.write(0, found, RingFormat.WHOLE, [], torch.zeros(NBYTES, dtype=torch.uint8))
    both.fetch(NBYTES, 3, random.Random(0))
    both.check()
    assert torch.equal(both.slabs[0], before)
    words = both.rings[0].memory[:32].view(torch.int64).tolist()
    assert words[:3] == [0, 1, signed(found)]


def test_fetches_wrap_around_the_ring_in_any_order_of_blocks():
    both, order = Both(), random.Random(3)
    for step in range(2 * SLOTS + 1):
        payload = torch.full((NBYTES,), step + 1, dtype=torch.uint8)
        both.write(step % SLOTS, step, RingFormat.WHOLE, [], payload)
        both.fetch(NBYTES, 1 + step % 3, order)
        both.check()
        assert both.slabs[0][:NBYTES].unique().tolist() == [step + 1]
