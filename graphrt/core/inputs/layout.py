"""Where the packed inputs of one size lie, and which bytes a step must move there.

`InputLayout` packs the inputs of one size one after the other. `StepMoves` says for some number of
live rows which bytes of each input are live and which are padding: a `FieldMove` for every input.
Who writes padding, on the host (`FieldMove.pad_at`), on the device (`FieldMove.pad_on_device`) or
in a kernel of a transport's own, takes it from the `pads` and `repeats` there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from ctypes import PYFUNCTYPE, c_size_t, c_void_p, cast, memmove, memset
from typing import Any, TypeVar

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from graphrt.core.base import tree
from graphrt.core.base.torch_names import inference_guard
from graphrt.core.inputs.spec import InputSpec

_ALIGNMENT = 256
"""Bytes; what allocators give, so kernels choose the same vector width as for tensors alone."""
_FEW_BYTES = 1 << 18
"""More are copied while others may run."""
_CACHED_MOVES = 128
"""Per layout: pairs of live tokens and requests."""

Span = tuple[int, int]
K = TypeVar("K")
V = TypeVar("V")

# `ctypes.memmove` gives the interpreter away and takes it back, which costs more than few bytes.
copy_few = PYFUNCTYPE(None, c_void_p, c_void_p, c_size_t)(cast(memmove, c_void_p).value or 0)


def remember(cache: dict[K, V], key: K, value: V, most: int) -> V:
    """Keep `value` in a cache, which is emptied when it has so many."""
    if len(cache) >= most:
        cache.clear()
    cache[key] = value
    return value


class PadPattern:
    """What the padding rows of one input hold, as bytes."""

    def __init__(self, spec: InputSpec) -> None:
        self.spec = spec
        self.value = spec.pad_value
        # Says of a tensor whether its bits are not its values; None for dtypes that have no such.
        self.lazy: Callable[[torch.Tensor], bool] | None = None
        if spec.dtype.is_floating_point or spec.dtype.is_complex:
            self.lazy = tree.is_lazy if spec.dtype.is_complex else torch.Tensor.is_neg
        self._element = torch.full((1,), self.value, dtype=spec.dtype, device="cpu")
        octets = bytes(self._element.view(torch.uint8).tolist())
        self._octet = octets[0] if len(set(octets)) == 1 else None
        self._rows = self._element
        word = octets * (8 // len(octets)) if len(octets) <= 8 else octets[:8]
        alike = len(octets) <= 8 or octets[8:] == octets[:8]
        self.word = int.from_bytes(word, "little") if alike else None
        """Eight bytes of padding as a number; None where no eight bytes are all of it."""

    def write(self, base: int, pads: list[Span]) -> None:
        """Pad the (start, bytes) after the address `base`, in host memory."""
        if self._octet is not None:
            for to, size in pads:
                memset(base + to, self._octet, size)
            return
        longest = pads[0][1]
        if self._rows.nbytes < longest:
            self._rows = self._element.expand(longest // self._element.nbytes).contiguous()
        rows = self._rows.data_ptr()
        for to, size in pads:
            memmove(base + to, rows, size)


class Field:
    """One input at one size: its place in the slab, cut in `blocks` by its batch axis.

    A block is what lies between two steps of the axes before the batch axis; it holds `rows` rows
    of `row_bytes`.
    """

    __slots__ = ("blocks", "name", "nbytes", "offset", "pattern", "row_bytes", "rows", "view")

    def __init__(self, name: str, pattern: PadPattern, offset: int, tokens: int, reqs: int) -> None:
        self.name = name
        self.pattern = pattern
        self.offset = offset
        sizes = self.spec.sizes(tokens, reqs)
        axis, dim = self.spec.batch_axis()
        self.blocks = math.prod(sizes[:dim])
        self.rows = sizes[dim] if axis is not None else 1
        inner = sizes[dim + 1 :] if axis is not None else sizes
        self.row_bytes = math.prod(inner) * self.spec.dtype.itemsize
        self.nbytes = self.blocks * self.rows * self.row_bytes
        self.view: torch.Tensor

    @property
    def spec(self) -> InputSpec:
        return self.pattern.spec

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class FieldMove:
    """The bytes of one input for some number of live rows.

    `copies` are (to, from, bytes), `pads` (to, bytes) and, where the last live row is repeated,
    `repeats` (from, to, bytes); "to" counts from the start of the slab.
    """

    __slots__ = ("_live_rows", "_views", "copies", "field", "one_block", "pads", "repeats", "shape")

    def __init__(self, field: Field, tokens: int, reqs: int) -> None:
        spec = field.spec
        axis, _ = spec.batch_axis()
        self.field = field
        self.shape = torch.Size(spec.sizes(tokens, reqs))
        live_rows = field.rows if axis is None else axis.size(tokens, reqs)
        size, block = live_rows * field.row_bytes, field.rows * field.row_bytes
        starts = [field.offset + index * block for index in range(field.blocks)]
        if size == block:
            starts, size = [field.offset], field.nbytes
        self.copies = [(start, index * size, size) for index, start in enumerate(starts) if size]
        # Whether the live rows lie in one piece.
        self.one_block = len(self.copies) <= 1
        rest = block - live_rows * field.row_bytes
        tails = [start + size for start in starts] if rest else []
        self.pads: list[Span] = []
        self.repeats: list[tuple[int, int, int]] = []
        if spec.pad == "repeat":
            self.repeats = [(tail - field.row_bytes, tail, rest) for tail in tails]
        else:
            self.pads = [(tail, rest) for tail in tails]
        self._live_rows = None if axis is None else live_rows
        self._views: tuple[torch.Tensor, torch.Tensor | None] | None = None

    @property
    def views(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The live rows and, along a batch axis, the padding rows. Made where devices write them:
        a host that copies would keep thousands of tensors for nothing."""
        views = self._views
        if views is None:
            view, live = self.field.view, self._live_rows
            views = view, None
            if live is not None:
                dim = self.field.spec.batch_axis()[1]
                with inference_guard(False):
                    padding = view.narrow(dim, live, self.field.rows - live)
                    views = view.narrow(dim, 0, live), padding
            self._views = views
        return views

    def lies_in(self, value: torch.Tensor) -> bool:
        """Whether `value`, which starts where this input starts, is laid out like it, and has its
        values there."""
        lazy = self.field.pattern.lazy
        if lazy is not None and lazy(value):
            return False
        if self.one_block and value.is_contiguous():
            return True
        return bool(value.stride() == self.field.view.stride())

    def copy_at(self, base: int, address: int) -> None:
        """Copy the live rows that lie at `address` into the host's packed memory at `base`."""
        for to, start, size in self.copies:
            copy = copy_few if size <= _FEW_BYTES else memmove
            copy(base + to, address + start, size)

    def pad_at(self, base: int) -> None:
        """Write the padding rows in the host's packed memory at `base`."""
        if self.pads:
            self.field.pattern.write(base, self.pads)
        for start, to, size in self.repeats:
            _repeat(base + start, base + to, self.field.row_bytes, size)

    def pad_on_device(self) -> None:
        """Write the padding rows by themselves, where the input lies."""
        if not (self.pads or self.repeats):
            return
        live, tail = self.views
        assert tail is not None
        if self.repeats:
            dim = self.field.spec.batch_axis()[1]
            tail.copy_(live.narrow(dim, live.shape[dim] - 1, 1))
        else:
            tail.fill_(self.field.pattern.value)


class StepMoves:
    """What a step of so many live tokens and requests moves into one layout."""

    __slots__ = (
        "alike",
        "fetch",
        "fields",
        "from_host",
        "padded",
        "prepared",
        "rows",
        "short",
        "whole",
    )

    def __init__(self, layout: InputLayout, tokens: int, reqs: int) -> None:
        self.fields = [FieldMove(field, tokens, reqs) for field in layout.fields]
        # One tuple for each packed input: what every step checks it against.
        self.rows = [
            (each.field.name, each.field.spec.dtype, each.shape, each.field.pattern.lazy, each)
            for each in self.fields
        ]
        self.from_host = "h" * len(self.fields)
        # Where to, and how many bytes, if each input is one short copy; else None. They are copied
        # in one call: see `copy_rows`.
        self.short: tuple[list[int], list[c_size_t]] | None = None
        firsts = [move.copies[0] for move in self.fields if len(move.copies) == 1]
        if len(firsts) == len(self.fields) and all(b <= _FEW_BYTES for _, _, b in firsts):
            self.short = [to for to, _, _ in firsts], [c_size_t(b) for _, _, b in firsts]
        self.padded = [move for move in self.fields if move.pads or move.repeats]
        self.fetch = layout.fetch
        # A transport keeps here what it prepared for such steps.
        self.prepared: Any = None
        # The compiled writer of the last such step, which native/replay.c calls first; None where
        # Python wrote it. It refuses inputs that are unlike those it was made for.
        self.alike: Any = None
        self.whole: list[Span] = [(0, layout.nbytes)] if layout.nbytes else []

    def pad_at(self, base: int) -> None:
        """Write all padding rows in the host's packed memory at `base`."""
        for move in self.padded:
            move.pad_at(base)

    def spans(self, kinds: str) -> list[Span]:
        """The parts of the slab that one copy each brings from the host.

        `kinds` has a letter for each field: "h" comes from the host, "d" is copied on the device,
        "k" is kept, as it is in place already.
        """
        spans: list[Span] = []
        for number, (move, kind) in enumerate(zip(self.fields, kinds, strict=True)):
            if kind == "h":
                follows = number > 0 and kinds[number - 1] == "h"
                start = spans.pop()[0] if follows else move.field.offset
                spans.append((start, move.field.end))
        return spans


class InputLayout:
    """The inputs of one size, one after the other in a slab, and the forward's views of them."""

    __slots__ = ("fetch", "fields", "known", "nbytes", "reqs", "tokens", "views")

    def __init__(self, packed: Mapping[str, PadPattern], tokens: int, reqs: int) -> None:
        self.tokens = tokens
        self.reqs = reqs
        self.fields: list[Field] = []
        offset = 0
        for name, pattern in packed.items():
            field = Field(name, pattern, offset, tokens, reqs)
            self.fields.append(field)
            offset += -(-field.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = self.fields[-1].end if self.fields else 0
        self.views: dict[str, torch.Tensor] = {}
        # What a graph captures to fetch its inputs; None where they are copied before its launch.
        self.fetch: Callable[[], None] | None = None
        # What `moves` has answered, by live tokens and requests.
        self.known: dict[tuple[int, int], StepMoves] = {}

    def place(self, slab: torch.Tensor) -> None:
        """Make the views in `slab`, a uint8 tensor of at least `nbytes`."""
        # Steps write them, in inference mode and outside of it.
        with inference_guard(False), torch.no_grad():
            for field in self.fields:
                part = slab[field.offset : field.end]
                if part.is_cpu and field.nbytes:
                    part = _own_storage(part)
                flat = part.view(field.spec.dtype)
                field.view = flat.view(field.spec.sizes(self.tokens, self.reqs))
        self.views = {field.name: field.view for field in self.fields}

    def moves(self, tokens: int, reqs: int) -> StepMoves:
        """What to move for so many live rows."""
        moves = self.known.get((tokens, reqs))
        if moves is None:
            with inference_guard(False):
                moves = StepMoves(self, tokens, reqs)
            remember(self.known, (tokens, reqs), moves, _CACHED_MOVES)
        return moves

    def reset(self) -> None:
        """Make every row a padding row."""
        for field in self.fields:
            field.view.fill_(field.pattern.value)


def _own_storage(part: torch.Tensor) -> torch.Tensor:
    """The bytes of `part` as a storage of their own, as those of a tensor alone: a forward may ask
    for `untyped_storage()`, or for `as_strided` from its start. It keeps the memory alive."""
    return from_dlpack(to_dlpack(part))


def _repeat(row: int, to: int, row_bytes: int, size: int) -> None:
    """Fill `size` bytes at address `to` with copies of the row at address `row`."""
    if size:
        memmove(to, row, row_bytes)
    done = row_bytes
    while done < size:
        more = min(done, size - done)
        memmove(to + done, to, more)
        done += more
