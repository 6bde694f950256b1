"""The memory of a CPU graph pool: blocks that never move, reused as soon as they are dropped."""

from __future__ import annotations

import gc
import mmap
import threading
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import KeyedRef, ref

import torch

from graphrt.core.base.errors import GraphRTError, PoolClosedError, ResourceExhaustedError
from graphrt.cpu.private_torch import conjugated, negated

_ALIGN = 64
"""Bytes: the alignment of blocks, as torch's own allocator gives it on the CPU."""
_FIRST_CHUNK_BYTES = 256 * 1024
_LARGEST_STEP_BYTES = 64 * 1024 * 1024
"""An arena that is full doubles, but grows by no more than this unless one block needs more."""


class _Chunk:
    """One mapping. Blocks and aliases keep the mapping alive, not the arena."""

    __slots__ = ("base", "buffer", "free_by_end", "free_by_start", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.buffer = memoryview(_map(nbytes))
        self.base = _storage(self.buffer).data_ptr()
        """The address of the first byte; offsets count from it."""
        self.free_by_start: dict[int, int] = {}
        """Offset of a free range -> its bytes."""
        self.free_by_end: dict[int, int] = {}
        """Offset behind a free range -> its offset."""


class Arena:
    """Memory that the graphs of one pool share, allocated while they are captured.

    A block goes back the moment the last reference to its storage is gone, and the next allocation
    may use it. Addresses never change: growing adds a chunk, and nothing is ever compacted. A block
    is known by its number, the *token*, which no other block ever gets.
    """

    def __init__(self, *, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._chunks: list[_Chunk] = []
        self._edges: list[int] = []
        """Begin and end addresses of chunks, sorted: begins have even indices, ends odd ones."""
        self._by_base: dict[int, _Chunk] = {}
        self._free: list[tuple[int, int, int]] = []
        """Free ranges as (bytes, chunk base, start), ordered, for best fit."""
        self._refs: dict[int, KeyedRef[int, Any]] = {}
        """Token -> weak reference to the block."""
        self._spans: dict[int, tuple[_Chunk, int, int]] = {}
        """Token -> (chunk, offset in it, bytes)."""
        self._token_at: dict[int, int] = {}
        """Address of a block -> its token."""
        # Finalizers run on any thread and inside the garbage collector, even while this thread
        # holds the lock: they only append here, and the next allocation takes the blocks back.
        self._dropped: deque[KeyedRef[int, Any]] = deque()
        self._lock = threading.RLock()
        self._next_token = 1
        self._live = 0
        """Bytes of all blocks."""
        self._reserved = 0
        """Bytes of all chunks."""
        self._closed = False
        self._torn = False
        """Whether a change of the tables is under way, or an interrupt ended one half-way."""
        self.wrapped: dict[int, Any] = {}
        """number of a storage -> weak reference, for storages that a capture made over the host's
        memory (an array, a buffer, a file)."""
        self._shares = 1
        """How many pools use the arena: the last `release` gives the memory back."""
        self._constants: Arena | None = None
        """Memory of constants alone. A block of this arena may have been another graph's before,
        and the replays of that graph still write it."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes mapped from the system."""
        constants = 0 if self._constants is None else self._constants.reserved_bytes
        return self._reserved + constants

    @property
    def live_bytes(self) -> int:
        """Bytes of the blocks that are referenced now."""
        with self._lock:
            if self._torn:
                self._mend()
            self._torn = True
            self._take_back()
            self._torn = False
            return self._live

    def empty_strided(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """An uninitialised tensor with exactly these strides; it owns its block."""
        nbytes = _extent_bytes(size, stride, dtype)
        if nbytes == 0:
            return torch.empty_strided(size, stride, dtype=dtype, device="cpu")
        storage = _storage(self._allocate(nbytes))
        return torch.empty(0, dtype=dtype, device="cpu").set_(
            storage, 0, tuple(size), tuple(stride)
        )

    def constant(self, like: torch.Tensor) -> tuple[torch.Tensor, object, ref[memoryview]]:
        """A new tensor like `like`, in memory that no other graph writes.

        Returns the tensor; an object that keeps its block in use when the tensor is gone; and a
        weak reference, which is dead once nothing refers to the tensor's storage.
        """
        with self._lock:
            self._check_open()
            if self._constants is None:
                self._constants = Arena()
        held = self._constants._allocate(_extent_bytes(like.size(), like.stride(), like.dtype))
        view = held[:]
        tensor = torch.empty(0, dtype=like.dtype, device="cpu")
        tensor.set_(_storage(view), 0, like.size(), like.stride())
        return tensor, held, ref(view)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with the same address, sizes, strides and extent of its storage. It keeps the
        memory mapped, but not the block in use."""
        whole = tensor.untyped_storage()
        address = whole.data_ptr()
        chunk = self._chunk_of(address)
        if chunk is None and self._constants is not None:
            return self._constants.alias(tensor)
        if chunk is None:
            raise GraphRTError(
                "tensor does not live in this arena",
                got=f"address {address:#x}",
                expected="memory that this arena allocated",
                advice="ask owns(tensor) first",
            )
        # The storage is as large as the block's own, so no operator reaches the neighbour: not one
        # that grows an output, nor a view of the storage.
        start = address - chunk.base
        weak = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
            _storage(chunk.buffer[start : start + whole.nbytes()]),
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
        )
        if tensor.is_conj():
            weak = conjugated(weak)
        if tensor.is_neg():
            weak = negated(weak)
        return weak

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of `tensor` is in this arena."""
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return False
        if bisect_right(self._edges, tensor.data_ptr()) % 2 == 1:
            return True
        return self._constants is not None and self._constants.owns(tensor)

    def token_of(self, tensor: torch.Tensor) -> int:
        """The number of the block whose storage `tensor` shares, or 0."""
        return self._token_at.get(tensor.untyped_storage().data_ptr(), 0)

    def is_live(self, token: int) -> bool:
        """Whether something still references that block."""
        block = self._refs.get(token)
        return block is not None and block() is not None

    def share(self) -> Arena:
        """Return this arena for one more pool, which must release it too."""
        with self._lock:
            self._check_open()
            self._shares += 1
        return self

    def save(self) -> list[tuple[memoryview, bytes]]:
        """The blocks that something references, each with a copy."""
        with self._lock:
            alive = [token for token, block in list(self._refs.items()) if block() is not None]
            spans = [self._spans[token] for token in alive if token in self._spans]
        blocks = [chunk.buffer[start : start + nbytes] for chunk, start, nbytes in spans]
        constants = [] if self._constants is None else self._constants.save()
        return [(block, bytes(block)) for block in blocks] + constants

    def restore(self, saved: list[tuple[memoryview, bytes]]) -> None:
        """Write back what `save` returned: the mappings have pages again."""
        for there, copy in saved:
            there[:] = copy

    def release(self) -> None:
        """Give the memory back, once all who share it have; tensors that still point into it keep
        their own mapping."""
        with self._lock:
            self._shares -= 1
            if self._shares > 0:
                return
            self._closed = True
            for table in (self._refs, self._spans, self._token_at, self._by_base):
                table.clear()
            for entries in (self._chunks, self._edges, self._free, self._dropped):
                entries.clear()
            self._live = self._reserved = 0
            if self._constants is not None:
                self._constants.release()

    def _chunk_of(self, address: int) -> _Chunk | None:
        edges = self._edges
        at = bisect_right(edges, address)
        return self._by_base[edges[at - 1]] if at % 2 else None

    def _allocate(self, nbytes: int) -> memoryview:
        with self._lock:
            self._check_open()
            if self._torn:
                self._mend()
            self._torn = True
            if self._dropped:
                self._take_back()
            aligned = _aligned(nbytes)
            chunk, start = self._take_free(aligned)
            token = self._next_token
            self._next_token += 1
            block = chunk.buffer[start : start + nbytes]
            self._refs[token] = KeyedRef(block, self._dropped.append, token)
            self._spans[token] = (chunk, start, aligned)
            self._token_at[chunk.base + start] = token
            self._live += aligned
            self._torn = False
            return block

    def _mend(self) -> None:
        """After an interrupt: rebuild all tables from the blocks that are still referenced."""
        self._dropped.clear()
        alive = {token for token, ref in list(self._refs.items()) if ref() is not None}
        for token in [token for token in self._spans if token not in alive]:
            del self._spans[token]
        self._refs = {token: ref for token, ref in self._refs.items() if token in self._spans}
        spans = sorted((chunk.base + start, size) for chunk, start, size in self._spans.values())
        self._token_at = {c.base + start: token for token, (c, start, _) in self._spans.items()}
        self._by_base = {chunk.base: chunk for chunk in self._chunks}
        self._edges = sorted(e for c in self._chunks for e in (c.base, c.base + c.nbytes))
        self._reserved = sum(chunk.nbytes for chunk in self._chunks)
        self._live = sum(size for _, size in spans)
        self._free.clear()
        for chunk in self._chunks:
            chunk.free_by_start.clear()
            chunk.free_by_end.clear()
            for start, nbytes in _gaps(chunk, spans):
                self._add_free(chunk, start, nbytes)
        self._torn = False

    def _take_free(self, needed: int) -> tuple[_Chunk, int]:
        at = bisect_left(self._free, (needed, 0, 0))
        if at == len(self._free):
            self._grow(needed)
            at = bisect_left(self._free, (needed, 0, 0))
        nbytes, base, start = self._free[at]
        chunk = self._by_base[base]
        self._remove_free(chunk, start, nbytes)
        if nbytes > needed:
            self._add_free(chunk, start + needed, nbytes - needed)
        return chunk, start

    def _grow(self, needed: int) -> None:
        """Add a chunk with room for `needed` bytes; raises `ResourceExhaustedError` at the limit,
        unless a collection frees a block that is large enough."""
        step = max(needed, _FIRST_CHUNK_BYTES, min(self._reserved, _LARGEST_STEP_BYTES))
        if self._max_bytes is not None and self._reserved + step > self._max_bytes:
            step = self._max_bytes - self._reserved
            if step < needed:
                # Only cycles of dead objects can still hold blocks; capture runs with the
                # collector off.
                gc.collect()
                self._take_back()
                if self._free and self._free[-1][0] >= needed:
                    return
                raise ResourceExhaustedError(
                    "the pool cannot grow without moving captured addresses",
                    got=f"{needed} bytes asked, {self._reserved} held ({self._live} live)",
                    expected=f"at most {self._max_bytes} bytes in all",
                    advice="raise the limit, or capture the largest size first",
                )
            step -= step % _ALIGN
        chunk = _Chunk(step)
        self._chunks.append(chunk)
        self._by_base[chunk.base] = chunk
        # One assignment: another thread may be looking for an address.
        self._edges = sorted([*self._edges, chunk.base, chunk.base + chunk.nbytes])
        self._reserved += step
        self._add_free(chunk, 0, step)

    def _take_back(self) -> None:
        while self._dropped:
            token = self._dropped.popleft().key
            span = self._spans.pop(token, None)
            if span is None:
                continue
            del self._refs[token]
            chunk, start, nbytes = span
            del self._token_at[chunk.base + start]
            self._live -= nbytes
            before = chunk.free_by_end.get(start)
            if before is not None:
                self._remove_free(chunk, before, start - before)
                nbytes, start = nbytes + start - before, before
            after = chunk.free_by_start.get(start + nbytes)
            if after is not None:
                self._remove_free(chunk, start + nbytes, after)
                nbytes += after
            self._add_free(chunk, start, nbytes)

    def _add_free(self, chunk: _Chunk, start: int, nbytes: int) -> None:
        chunk.free_by_start[start] = nbytes
        chunk.free_by_end[start + nbytes] = start
        insort(self._free, (nbytes, chunk.base, start))

    def _remove_free(self, chunk: _Chunk, start: int, nbytes: int) -> None:
        del chunk.free_by_start[start]
        del chunk.free_by_end[start + nbytes]
        del self._free[bisect_left(self._free, (nbytes, chunk.base, start))]

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosedError("the arena was released", advice="a new GraphPool")


def _map(nbytes: int) -> mmap.mmap:
    # Private: a process that is forked gets memory of its own, as from any allocator.
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, nbytes)


# Bound here: while a capture is open, torch.frombuffer is watched.
_from_buffer = torch.frombuffer


def _storage(memory: memoryview) -> torch.UntypedStorage:
    return _from_buffer(memory, dtype=torch.uint8).untyped_storage()


def _gaps(chunk: _Chunk, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The ranges of a chunk, as (start, bytes), that none of `spans` covers: (address, bytes),
    ordered."""
    at, end = chunk.base, chunk.base + chunk.nbytes
    inside = spans[bisect_left(spans, (at, 0)) : bisect_left(spans, (end, 0))]
    for address, nbytes in [*inside, (end, 0)]:
        if address > at:
            yield at - chunk.base, address - at
        at = address + nbytes


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _extent_bytes(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    if 0 in size:
        return 0
    last = 0
    for n, step in zip(size, stride, strict=True):
        last += (n - 1) * step
    return (last + 1) * dtype.itemsize
