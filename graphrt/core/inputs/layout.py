"""Where the packed inputs of one size are, and which bytes a step must move there.

`InputLayout` packs the inputs of one size one after the other. `StepMoves` says for some number of
live rows which bytes of each input are live and which are padding: a `FieldMove` for every input.
Its `pads` and `repeats` are written by the host (`pad_at`), by the device (`pad_on_device`), or by
a transport's own kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from ctypes import PYFUNCTYPE, c_size_t, c_void_p, cast, memmove, memset
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from graphrt.core.base import tree
from graphrt.core.base.torch_names import copy_all, inference_guard, tensor_guards, zero_all
from graphrt.core.inputs.spec import InputSpec

_ALIGNMENT = 256
"""Bytes; what allocators give, so kernels choose the same vector width as for tensors alone."""
_FEW_BYTES = 1 << 18
"""Larger copies release the GIL, so that other threads run."""
_MOST_LIKE, MOST_GUARDS = 4, 16
"""How many guards are kept, and are ever made, for one number of rows: see `StepMoves.like`."""
_CACHED_MOVES = 128
"""The most pairs of live tokens and requests whose `StepMoves` one layout keeps."""

Span = tuple[int, int]
"""A part of the slab: of a move's `pads` (to, bytes), of `StepMoves.spans` (start, end)."""

# `ctypes.memmove` releases the GIL, which costs more than copying few bytes. This one does not.
copy_few = PYFUNCTYPE(None, c_void_p, c_void_p, c_size_t)(cast(memmove, c_void_p).value or 0)


Lazy = Callable[[torch.Tensor], bool] | None
"""Tells whether a tensor is a lazy conjugate or negative, whose bits are not its values; None for
dtypes without these."""


def lazy_of(dtype: torch.dtype) -> Lazy:
    """What tells of tensors of a dtype whether they are lazy."""
    if dtype.is_complex:
        return tree.is_lazy
    return torch.Tensor.is_neg if dtype.is_floating_point else None


class Field:
    """One input at one size: its place in the slab, and what its padding rows hold.

    It has `blocks`, one for each index of the axes before the batch axis, so mostly one. A block
    has `rows` rows of `row_bytes`.
    """

    def __init__(self, name: str, spec: InputSpec, offset: int, tokens: int, reqs: int) -> None:
        self.name = name
        self.spec = spec
        self.offset = offset
        sizes = spec.sizes(tokens, reqs)
        axis, dim = spec.batch_axis()
        self.blocks = math.prod(sizes[:dim])
        self.rows = sizes[dim] if axis is not None else 1
        inner = sizes[dim + 1 :] if axis is not None else sizes
        self.row_bytes = math.prod(inner) * spec.dtype.itemsize
        self.end = offset + self.blocks * self.rows * self.row_bytes
        # The padded tensor in the slab that graphs read; `InputLayout.place` makes it.
        self.view: torch.Tensor
        self.lazy = lazy_of(spec.dtype)
        self.pad = spec.pad_value
        # A tensor of one padding value on the host, whose bytes `pad_at` copies.
        self.element = torch.full((1,), self.pad, dtype=spec.dtype, device="cpu")
        octets = bytes(self.element.view(torch.uint8).tolist())
        self.octets = octets[:1] if len(set(octets)) == 1 else octets
        """What padding repeats: one byte if all bytes of an element are equal, else the element."""


class FieldMove:
    """The bytes of one input for some number of live rows.

    `copies` are (to, from, bytes), `pads` (to, bytes) and, where the last live row is repeated,
    `repeats` (from, to, bytes); "to" counts from the start of the slab.
    """

    def __init__(self, field: Field, tokens: int, reqs: int) -> None:
        spec = field.spec
        axis, _ = spec.batch_axis()
        self.field = field
        self.shape = torch.Size(spec.sizes(tokens, reqs))
        self.rows = field.rows if axis is None else axis.size(tokens, reqs)
        live, block = self.rows * field.row_bytes, field.rows * field.row_bytes
        padding = block - live
        starts = [field.offset + index * block for index in range(field.blocks)]
        tails = [start + live for start in starts] if padding else []
        if not padding:
            # All blocks are one copy.
            starts, live = [field.offset], field.end - field.offset
        self.copies = [(start, index * live, live) for index, start in enumerate(starts) if live]
        repeated = spec.pad == "repeat"
        self.pads: list[Span] = [] if repeated else [(tail, padding) for tail in tails]
        self.repeats = [(tail - field.row_bytes, tail, padding) for tail in tails if repeated]

    # Made when a device writes them: where the host copies, thousands would be kept for nothing.

    @cached_property
    def live(self) -> torch.Tensor:
        """The live rows of the input in the slab."""
        return self._narrowed(0, self.rows)

    @cached_property
    def padding(self) -> torch.Tensor:
        """The padding rows after them."""
        return self._narrowed(self.rows, self.field.rows - self.rows)

    @cached_property
    def repeated(self) -> torch.Tensor:
        """The last live row, which padding rows repeat."""
        return self.live.narrow(self.field.spec.batch_axis()[1], self.rows - 1, 1)

    def _narrowed(self, start: int, rows: int) -> torch.Tensor:
        axis, dim = self.field.spec.batch_axis()
        if axis is None:
            return self.field.view
        with inference_guard(False):
            return self.field.view.narrow(dim, start, rows)

    def lies_in(self, value: torch.Tensor) -> bool:
        """Whether `value`, which has this input's address, is the input in place: with its strides,
        and bits that are its values."""
        lazy = self.field.lazy
        if lazy is not None and lazy(value):
            return False
        if len(self.copies) <= 1 and value.is_contiguous():
            return True
        return bool(value.stride() == self.field.view.stride())

    def copy_at(self, base: int, address: int) -> None:
        """Copy the live rows at `address` into the host's packed memory at `base`."""
        for to, start, size in self.copies:
            copy = copy_few if size <= _FEW_BYTES else memmove
            copy(base + to, address + start, size)

    def pad_at(self, base: int) -> None:
        """Write the padding rows in the host's packed memory at `base`."""
        field = self.field
        for to, size in self.pads:
            if len(field.octets) == 1:
                memset(base + to, field.octets[0], size)
            else:
                _repeat(field.element.data_ptr(), base + to, field.spec.dtype.itemsize, size)
        for start, to, size in self.repeats:
            _repeat(base + start, base + to, field.row_bytes, size)

    def pad_on_device(self) -> None:
        """Write the padding rows in the slab itself."""
        if self.repeats:
            self.padding.copy_(self.repeated)
        elif self.pads:
            self.padding.fill_(self.field.pad)


class DeviceMoves:
    """What a step does on the device for inputs of some `kinds`: few calls for all of them, each of
    one dtype, as torch would take several of them one by one."""

    def __init__(self, fields: list[FieldMove], kinds: str) -> None:
        copies: dict[torch.dtype, list[int]] = {}
        zeros: dict[torch.dtype, list[torch.Tensor]] = {}
        # Other padding than zeros.
        self._others: list[FieldMove] = []
        for number, (move, kind) in enumerate(zip(fields, kinds, strict=True)):
            dtype = move.field.spec.dtype
            if kind == "d":
                copies.setdefault(dtype, []).append(number)
            if kind != "h" and move.pads and move.field.octets == b"\0":
                zeros.setdefault(dtype, []).append(move.padding)
            elif kind != "h" and (move.pads or move.repeats):
                self._others.append(move)
        self._zeros = [*zeros.values()]
        # Which inputs are copied, and where to.
        self._copies = [(each, [fields[at].live for at in each]) for each in copies.values()]

    def copy(self, tensors: list[torch.Tensor]) -> None:
        """Copy the live rows that are on a device already."""
        for numbers, places in self._copies:
            values = [tensors[number] for number in numbers]
            values = [each.detach() if each.requires_grad else each for each in values]
            if len(places) == 1:
                places[0].copy_(values[0])
            else:
                copy_all(places, values)

    def pad(self) -> None:
        """Write the padding rows of all that does not come from the host."""
        for places in self._zeros:
            zero_all(places)
        for move in self._others:
            move.pad_on_device()


class StepMoves:
    """What a step of so many live tokens and requests moves into one layout."""

    # A slot, because native/replay.c reads `alike` at a fixed offset.
    __slots__ = ("__dict__", "alike")

    def __init__(self, layout: InputLayout, tokens: int, reqs: int) -> None:
        self.fields = [FieldMove(field, tokens, reqs) for field in layout.fields]
        # One tuple for each packed input: what every step checks it against.
        self.rows = [
            (each.field.name, each.field.spec.dtype, each.shape, each.field.lazy, each)
            for each in self.fields
        ]
        self.names = [*map(itemgetter(0), self.rows)]
        # The `kinds` of a step whose inputs are all in host memory.
        self.from_host = "h" * len(self.fields)
        # torch's guards of earlier inputs that could be used as they are, with the `kinds` of these
        # and, if all were in place, their addresses: in one call a guard tells whether inputs are
        # like them. Their number is limited: a host that mixes many kinds of inputs would make one
        # at every step.
        self.like: list[tuple[Callable[..., bool], str, list[int] | None]] = []
        # kinds -> what a step of inputs of these kinds does on the device.
        self._on_device: dict[str, DeviceMoves] = {}
        # The addresses of the last inputs that were found to be outside of the slab.
        self.last: list[int] = []
        # How many guards were made so far, at most `MOST_GUARDS`.
        self._made = 0
        # If each input is one short copy: where to, and how many bytes. `copy_rows` then copies all
        # in one call.
        self.short: tuple[list[int], list[c_size_t]] | None = None
        firsts = [move.copies[0] for move in self.fields if len(move.copies) == 1]
        if len(firsts) == len(self.fields) and all(b <= _FEW_BYTES for _, _, b in firsts):
            self.short = [to for to, _, _ in firsts], [c_size_t(b) for _, _, b in firsts]
        # The inputs that have padding rows in such a step.
        self.padded = [move for move in self.fields if move.pads or move.repeats]
        self.fetch = layout.fetch
        # A transport keeps here what it prepared for such steps.
        self.prepared: Any = None
        # The compiled writer of the last such step, which native/replay.c calls first; None where
        # Python wrote it. It refuses inputs that are unlike those it was made for.
        self.alike: Any = None
        # `spans` of a step whose inputs all come from the host.
        self.whole = self.spans(self.from_host)

    def expect_like(self, tensors: list[torch.Tensor], addresses: list[int], kinds: str) -> None:
        """Remember inputs that are used as they are: of these types, dtypes, devices, shapes and
        strides, all in the slab at these addresses, or none."""
        home = addresses if kinds == "k" * len(kinds) else None
        if tensor_guards and self._made < MOST_GUARDS and (home or "k" not in kinds):
            self._made += 1
            none: dict[str, None] = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
            guard = tensor_guards(*tensors, **none)
            # Inputs in place first: a guard of others costs more than to compare addresses.
            like = [(guard.check, kinds, home), *self.like]
            self.like = sorted(like, key=lambda each: each[2] is None)[:_MOST_LIKE]

    def on_device(self, kinds: str) -> DeviceMoves:
        """What is copied and padded on the device, for inputs of these kinds."""
        found = self._on_device.get(kinds)
        if found is None:
            found = self._on_device[kinds] = DeviceMoves(self.fields, kinds)
        return found

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

    def __init__(self, specs: Mapping[str, InputSpec], tokens: int, reqs: int) -> None:
        self.tokens = tokens
        self.reqs = reqs
        self.fields: list[Field] = []
        offset = 0
        for name, spec in specs.items():
            self.fields.append(Field(name, spec, offset, tokens, reqs))
            offset = -(-self.fields[-1].end // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = self.fields[-1].end
        self.views: dict[str, torch.Tensor] = {}
        # What a graph captures to fetch its inputs; None where inputs are copied before a launch.
        self.fetch: Callable[[], None] | None = None
        # What `moves` has answered, by live tokens and requests.
        self.known: dict[tuple[int, int], StepMoves] = {}

    def place(self, slab: torch.Tensor) -> None:
        """Make the views in `slab`, a uint8 tensor of at least `nbytes`."""
        # Steps write them, in inference mode and outside of it.
        with inference_guard(False), torch.no_grad():
            for field in self.fields:
                part = slab[field.offset : field.end]
                if part.is_cpu and part.numel():
                    # A storage of their own, as those of a tensor alone: a forward may ask for
                    # `untyped_storage()`, or for `as_strided` from its start. The memory stays.
                    part = from_dlpack(to_dlpack(part))
                flat = part.view(field.spec.dtype)
                field.view = flat.view(field.spec.sizes(self.tokens, self.reqs))
        self.views = {field.name: field.view for field in self.fields}

    def moves(self, tokens: int, reqs: int) -> StepMoves:
        """What to move for so many live rows."""
        moves = self.known.get((tokens, reqs))
        if moves is None:
            with inference_guard(False):
                moves = StepMoves(self, tokens, reqs)
            if len(self.known) >= _CACHED_MOVES:
                self.known.clear()
            self.known[tokens, reqs] = moves
        return moves


def _repeat(row: int, to: int, row_bytes: int, size: int) -> None:
    """Fill `size` bytes at address `to` with copies of the row at address `row`."""
    if size:
        memmove(to, row, row_bytes)
    done = row_bytes
    while done < size:
        more = min(done, size - done)
        memmove(to + done, to, more)
        done += more
