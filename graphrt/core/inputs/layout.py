"""Where the packed inputs of one size lie, and which bytes a step must move there."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from graphrt.core.base import inference_guard
from graphrt.core.inputs.spec import InputSpec

_ALIGNMENT = 256
"""Bytes; what allocators give, so kernels choose the same vector width as for tensors alone."""

FEW_BYTES = 1 << 18
"""More are copied while others may run."""

Span = tuple[int, int]


class Field:
    """One input at one size: its place in the slab, cut in `blocks` by its batch axis.

    A block is what lies between two steps of the axes before the batch axis; it holds `rows` rows
    of `row_bytes`.
    """

    __slots__ = ("blocks", "extra", "name", "nbytes", "offset", "row_bytes", "rows", "spec", "view")

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
        self.nbytes = self.blocks * self.rows * self.row_bytes
        self.view: torch.Tensor

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class FieldMove:
    """The bytes of one input for some number of live rows.

    `copies` are (to, from, bytes), `pads` (to, bytes) and, where the last live row is repeated,
    `repeats` (from, to, bytes); "to" counts from the start of the slab.
    """

    __slots__ = (
        "_dim",
        "_live_rows",
        "_views",
        "copies",
        "dtype",
        "few_bytes",
        "field",
        "may_negate",
        "name",
        "number",
        "offset",
        "pads",
        "repeats",
        "shape",
    )

    def __init__(self, number: int, field: Field, tokens: int, reqs: int) -> None:
        spec = field.spec
        axis, dim = spec.batch_axis()
        self.number = number
        self.field = field
        self.name = field.name
        self.dtype = spec.dtype
        self.offset = field.offset
        self.shape = torch.Size(spec.sizes(tokens, reqs))
        # Only complex arithmetic makes tensors whose bits are not their values.
        self.may_negate = spec.dtype.is_floating_point or spec.dtype.is_complex
        live_rows = field.rows if axis is None else axis.size(tokens, reqs)
        size, block = live_rows * field.row_bytes, field.rows * field.row_bytes
        starts = [field.offset + index * block for index in range(field.blocks)]
        if size == block:
            starts, size = [field.offset], field.nbytes
        self.copies = [(start, index * size, size) for index, start in enumerate(starts) if size]
        # What one short copy brings, else 0.
        self.few_bytes = size if len(self.copies) == 1 and size <= FEW_BYTES else 0
        rest = block - live_rows * field.row_bytes
        tails = [start + size for start in starts] if rest else []
        self.pads: list[Span] = []
        self.repeats: list[tuple[int, int, int]] = []
        if spec.pad == "repeat":
            self.repeats = [(tail - field.row_bytes, tail, rest) for tail in tails]
        else:
            self.pads = [(tail, rest) for tail in tails]
        self._live_rows = None if axis is None else live_rows
        self._dim = dim
        self._views: tuple[torch.Tensor, torch.Tensor | None] | None = None

    @property
    def one_block(self) -> bool:
        """Whether the live rows lie in one piece."""
        return len(self.copies) <= 1

    @property
    def views(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The live rows and, along a batch axis, the padding rows. Made where devices write them:
        a host that copies would keep thousands of tensors for nothing."""
        found = self._views
        if found is None:
            view, live, dim = self.field.view, self._live_rows, self._dim
            if live is None:
                found = view, None
            else:
                with inference_guard(False):
                    rest = view.narrow(dim, live, self.field.rows - live)
                    found = view.narrow(dim, 0, live), rest
            self._views = found
        return found

    def live_part(self, padded: torch.Tensor) -> torch.Tensor:
        """The live rows of a tensor of the padded shape."""
        rows = self._live_rows
        return padded if rows is None else padded.narrow(self._dim, 0, rows)

    def lies_in(self, value: torch.Tensor) -> bool:
        """Whether `value`, which starts where this input starts, is laid out like it."""
        laid_out_alike = value.stride() == self.field.view.stride()
        return laid_out_alike or (self.one_block and value.is_contiguous())

    def pad_on_device(self) -> None:
        """Write the padding rows by themselves."""
        live, tail = self.views
        if tail is None or tail.numel() == 0:
            return
        if self.field.spec.pad == "repeat":
            tail.copy_(live.narrow(self._dim, live.shape[self._dim] - 1, 1))
        else:
            tail.fill_(self.field.spec.pad_value)


class StepMoves:
    """What a step of so many live tokens and requests moves into one layout."""

    __slots__ = (
        "_spans",
        "alike",
        "fields",
        "fills",
        "kinds",
        "live",
        "made",
        "places",
        "rows",
        "tables",
        "whole",
    )

    def __init__(self, layout: InputLayout, tokens: int, reqs: int) -> None:
        self.live = tokens, reqs
        self.fields = [
            FieldMove(number, field, tokens, reqs) for number, field in enumerate(layout.fields)
        ]
        # What is looked at of each at every step, in one tuple.
        self.rows = [
            (move.name, move.dtype, move.shape, move.offset, move.few_bytes, move.may_negate, move)
            for move in self.fields
        ]
        # What writes inputs that are like others that were right, once there were some: of the
        # last kinds that were seen, and of the last one, and how many of them were made.
        self.kinds: list[Any] = []
        self.alike: Any = None
        self.made = 0
        # By address, where the fields lie in the memory of a slot.
        self.places = layout.places
        # What is prepared for inputs of the same kinds of places, by whoever moves them.
        self.tables: dict[Hashable, Any] = {}
        self.fills: Any = None
        self.whole: tuple[Span, ...] = ((0, layout.nbytes),) if layout.nbytes else ()
        self._spans: dict[str, tuple[Span, ...]] = {}

    def learn(self, alike: Any, most: int) -> None:
        """Remember what writes inputs of one more kind, if there is such a thing, of so many."""
        self.made += 1
        self.alike = alike
        if alike is not None:
            self.kinds = [*self.kinds[-most + 1 :], alike]

    def spans(self, kinds: str) -> tuple[Span, ...]:
        """The parts of the slab that one copy each brings from the host.

        `kinds` has a letter for each field: "h" comes from the host, "d" is copied over it
        afterwards on the device, "k" is kept, as it is in place already.
        """
        found = self._spans.get(kinds)
        if found is None:
            found = self._spans[kinds] = tuple(self._find_spans(kinds))
        return found

    def _find_spans(self, kinds: str) -> Iterable[Span]:
        start = end = -1
        for move, kind in zip(self.fields, kinds, strict=True):
            field = move.field
            if kind == "h" or (kind == "d" and move.pads):
                start = field.offset if start < 0 else start
                end = field.end
            elif kind == "k":
                # The live rows must not be touched; a tail in one piece can begin the next span.
                if start >= 0:
                    yield start, end
                start = -1
                if move.pads and move.one_block:
                    start, end = move.pads[0][0], field.end
        if start >= 0:
            yield start, end


class InputLayout:
    """The packed inputs of one size in one slab, and the views that the forward reads."""

    __slots__ = ("fetch", "fields", "known", "nbytes", "places", "reqs", "tokens", "views")

    def __init__(self, specs: Mapping[str, InputSpec], tokens: int, reqs: int) -> None:
        self.tokens = tokens
        self.reqs = reqs
        self.fields: list[Field] = []
        offset = 0
        for name, spec in specs.items():
            field = Field(name, spec, offset, tokens, reqs)
            self.fields.append(field)
            offset += -(-field.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = self.fields[-1].end if self.fields else 0
        self.views: dict[str, torch.Tensor] = {}
        # What fetches a slot of a ring into this layout; None where that is not how it is filled.
        self.fetch: Callable[[], None] | None = None
        # What `moves` has answered, by live tokens and requests.
        self.known: dict[tuple[int, int], StepMoves] = {}
        # By address, where the fields lie in the memory of a slot, for a call that copies them.
        self.places: dict[int, tuple[Any, ...]] = {}

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
                self.views[field.name] = field.view

    def moves(self, tokens: int, reqs: int, keep: int) -> StepMoves:
        """What to move for so many live rows; up to `keep` answers are kept."""
        found = self.known.get((tokens, reqs))
        if found is None:
            with inference_guard(False):
                found = StepMoves(self, tokens, reqs)
            if len(self.known) >= keep:
                self.known.clear()
            self.known[tokens, reqs] = found
        return found

    def reset(self) -> None:
        """Make every row a padding row."""
        for field in self.fields:
            field.view.fill_(field.spec.pad_value)


def _own_storage(part: torch.Tensor) -> torch.Tensor:
    """The bytes of `part` as a storage of their own, as those of a tensor alone: a forward may ask
    for `untyped_storage()`, or for `as_strided` from its start. It keeps the memory alive."""
    return from_dlpack(to_dlpack(part))


def pad_bytes(spec: InputSpec) -> Any:
    """One element of the padding as a one-element CPU tensor."""
    return torch.full((1,), spec.pad_value, dtype=spec.dtype, device="cpu")
