"""Static inputs: a runner's buffers, filled and padded for every step."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import memmove, memset
from typing import Any

import torch

from graphrt.core.base import InvalidInputError, copy_all
from graphrt.core.device import Platform
from graphrt.core.inputs.declared import check_fits, declared_inputs, flat_of
from graphrt.core.inputs.layout import FieldMove, InputLayout
from graphrt.core.inputs.padding_rows import PaddingRows
from graphrt.core.inputs.single_address import FixedInput
from graphrt.core.inputs.spec import InputSpec, check_memory, check_other, check_value
from graphrt.core.inputs.staging import Staging, Window

_Tensor = torch.Tensor
_CACHED_LAYOUTS = 1024
_CACHED_MOVES = 128
"""Per layout: pairs of live tokens and requests."""


class StaticInputs:
    """All inputs of a runner. Nested mappings of specs become dotted names.

    The packed ones share a slab: at each size they lie one after the other, so that all that come
    from the host, padding included, go over in one copy.
    """

    def __init__(
        self, specs: Mapping[str, Any], *, platform: Platform, tokens: int, reqs: int, device: Any
    ) -> None:
        self._specs = declared_inputs(specs)
        check_fits(self._specs, platform, tokens, reqs)
        self.nested = any(isinstance(spec, Mapping) for spec in specs.values())
        self.tokens = tokens
        self.reqs = reqs
        self._packed = {name: spec for name, spec in self._specs.items() if spec.packed}
        self._fixed = [
            FixedInput(name, spec, tokens, reqs, device)
            for name, spec in self._specs.items()
            if not spec.packed
        ]
        self.padding = PaddingRows(self._specs, self._fixed)
        self._axes = {name: spec.batch_axis() for name, spec in self._specs.items()}
        self._pads = {name: _PadSource(spec) for name, spec in self._packed.items()}
        self._layouts: dict[tuple[int, int], InputLayout] = {}
        nbytes = InputLayout(self._packed, tokens, reqs).nbytes
        with torch.inference_mode(False):
            self._slab = Window(torch.zeros(nbytes, dtype=torch.uint8, device=device))
        self._low = self._slab.buffer.data_ptr()
        self._high = self._low + nbytes
        self._slab_start = self._slab.buffer.untyped_storage().data_ptr()
        self._fixed_starts = {own.buffer.untyped_storage().data_ptr() for own in self._fixed}
        on_host = self._slab.buffer.device.type == "cpu"
        self._staging = None if on_host else Staging(platform, nbytes)
        self.reset()

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers at the largest size by name; packed ones move with the size."""
        return self.layout(self.tokens, self.reqs).views

    @property
    def staging_waits(self) -> int:
        """How often the host had to wait until its staging memory was free."""
        return 0 if self._staging is None else self._staging.waits

    def layout(self, tokens: int, reqs: int) -> InputLayout:
        """Where the inputs of a batch of this size lie."""
        found = self._layouts.get((tokens, reqs))
        if found is None:
            found = InputLayout(self._packed, tokens, reqs)
            found.place(self._slab.buffer)
            found.views.update({own.name: own.view(tokens, reqs) for own in self._fixed})
            if len(self._layouts) >= _CACHED_LAYOUTS:
                self._layouts.clear()
            self._layouts[tokens, reqs] = found
        return found

    def fill(
        self,
        values: Mapping[str, Any],
        layout: InputLayout,
        tokens: int,
        reqs: int,
        stream: Any = None,
    ) -> None:
        """Copy a step's live rows into the buffers and pad them up to the size of `layout`.

        `stream` is the current one, on platforms that have streams.

        Everything is checked before anything is written; raises `InvalidInputError`.
        """
        # Free where nothing goes wrong: what a tensor lacks shows when it is used.
        try:
            if self.nested:
                values = dict(flat_of(values))
            if len(values) != len(self._specs):
                self.check_names(values)
            moves = layout.moves(tokens, reqs, _CACHED_MOVES)
            sources: list[torch.Tensor | None] = []
            kinds = ""
            for move in moves.fields:
                value = values[move.name]
                if (
                    type(value) is not _Tensor
                    or value.dtype is not move.dtype
                    or value.shape != move.shape
                ):
                    check_other(move.name, move.field.spec, value, tuple(move.shape))
                address = value.data_ptr()
                if self._low <= address < self._high:
                    if address == self._low + move.offset and move.lies_in(value):
                        sources.append(None)
                        kinds += "k"
                        continue
                    # What is written next may lie under it.
                    value = value.detach().clone()
                if not value.is_cpu:
                    sources.append(value)
                    kinds += "d"
                    continue
                if not value.is_contiguous() or (move.may_negate and _has_lazy_bits(value)):
                    value = value.detach().resolve_conj().resolve_neg().contiguous()
                sources.append(value)
                kinds += "h"
            for own in self._fixed:
                own.check(values.get(own.name), tokens, reqs)
            if self._staging is None:
                self._write(moves.fields, sources, kinds, self._low)
            else:
                spans = moves.whole if kinds.count("h") == len(kinds) else moves.spans(kinds)
                if spans:
                    slot = self._staging.take()
                    self._write(moves.fields, sources, kinds, slot.address)
                    slot.copy_to(self._slab, spans, stream)
            if "d" in kinds or (self._staging is not None and "k" in kinds):
                self._write_on_device(moves.fields, sources, kinds)
            for own in self._fixed:
                own.fill(values[own.name], tokens, reqs, layout.tokens, layout.reqs)
        except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError) as error:
            self.check(values, tokens, reqs, error)
            raise

    def copies(self, values: Mapping[str, Any], tokens: int, reqs: int) -> dict[str, torch.Tensor]:
        """Copies of a step's inputs by (dotted) name, where the buffers are: for a step that has
        more rows than they. Raises `InvalidInputError`."""
        found = self.check(values, tokens, reqs)
        device = self._slab.buffer.device
        try:
            return {
                name: value.detach().to(device, copy=True, memory_format=torch.contiguous_format)
                for name, value in found.items()
            }
        except (NotImplementedError, RuntimeError) as error:
            self.check(values, tokens, reqs, error)
            raise

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in the buffers, which the next step writes again."""
        start = tensor.untyped_storage().data_ptr()
        return start == self._slab_start or start in self._fixed_starts

    def reset(self, layout: InputLayout | None = None) -> None:
        """Make every row of `layout`, by default of the largest one, a padding row."""
        (layout or self.layout(self.tokens, self.reqs)).reset()
        for own in self._fixed:
            own.reset()

    def check_names(self, values: Mapping[str, Any]) -> None:
        """Raise `InvalidInputError` for missing or unknown input names."""
        missing = sorted(self._specs.keys() - values.keys())
        unknown = sorted(values.keys() - self._specs.keys())
        if missing or unknown:
            raise InvalidInputError(
                "the step's inputs are not the declared ones",
                got=f"missing {missing}, unknown {unknown}",
                expected=sorted(self._specs),
                advice="declare every input of the forward in inputs= and pass each of them",
            )

    def check(
        self,
        values: object,
        tokens: int | None,
        reqs: int | None,
        error: Exception | None = None,
    ) -> dict[str, Any]:
        """A step's inputs by (dotted) name; raises `InvalidInputError` for names, dtypes and shapes
        that are not the declared ones, and for tensors that have no rows in memory.

        `tokens` and `reqs` are the live ones, None if they are not known; `error` is what using the
        inputs raised, if they were used.
        """
        found = self._named(values)
        for name, spec in self._specs.items():
            live = None if tokens is None or reqs is None else spec.sizes(tokens, reqs)
            wrong = check_value(name, spec, found[name], live)
            if wrong is not None:
                raise wrong from error
            unreadable = check_memory(name, spec, found[name])
            if unreadable is not None:
                raise unreadable from error
        return found

    def infer(self, values: Mapping[str, Any]) -> tuple[int, int | None]:
        """Tokens and requests as the shapes of the inputs say; None where they say nothing."""
        found: dict[str, int] = {}
        try:
            flat = dict(flat_of(values)) if self.nested else values
            self.check_names(flat)
            for name, (axis, dim) in self._axes.items():
                if axis is None:
                    continue
                rows = flat[name].shape[dim] - axis.extra
                if found.setdefault(axis.name, rows) != rows:
                    raise InvalidInputError(
                        f"the inputs disagree on the number of {axis.name}",
                        got=f"{rows} by {name!r}",
                        expected=found[axis.name],
                    )
        except (AttributeError, IndexError, RuntimeError, TypeError) as error:
            self.check(values, None, None, error)
            raise
        reqs = found.get("reqs")
        return found.get("tokens", reqs or 0), reqs

    def _named(self, values: object) -> dict[str, Any]:
        if not isinstance(values, Mapping):
            raise InvalidInputError(
                "a step's inputs are no mapping",
                got=type(values).__name__,
                expected=f"a mapping of {sorted(self._specs)} to tensors",
                advice="pass each input by its name",
            )
        found = dict(flat_of(values))
        self.check_names(found)
        return found

    def _write(
        self,
        moves: list[FieldMove],
        sources: list[torch.Tensor | None],
        kinds: str,
        base: int,
    ) -> None:
        """Write live rows and padding to the host memory at `base`: the slab, or a slot for it."""
        in_slab = self._staging is None
        for move, source, kind in zip(moves, sources, kinds, strict=True):
            if kind == "h" and source is not None:
                address = source.data_ptr()
                for to, start, size in move.copies:
                    memmove(base + to, address + start, size)
            if move.pads:
                self._pads[move.name].write(base, move.pads)
            elif move.repeats and (kind == "h" or in_slab):
                for start, to, size in move.repeats:
                    _repeat(base + start, base + to, move.field.row_bytes, size)

    def _write_on_device(
        self, moves: list[FieldMove], sources: list[torch.Tensor | None], kinds: str
    ) -> None:
        """Copy what lives on a device already, in one fused copy, and pad what needs it there."""
        # Tensors of one dtype are one kernel; of several, torch would copy each by itself.
        copies: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for move, source, kind in zip(moves, sources, kinds, strict=True):
            if kind == "d" and source is not None:
                places, values = copies.setdefault(move.dtype, ([], []))
                places.append(move.views[0])
                values.append(source.detach() if source.requires_grad else source)
        for places, values in copies.values():
            if len(places) == 1:
                places[0].copy_(values[0])
            else:
                copy_all(places, values)
        for move, kind in zip(moves, kinds, strict=True):
            # Constant padding came with the copy from the host, but for tails in several pieces.
            padded = move.repeats or (kind == "k" and move.pads and not move.one_block)
            if kind in "dk" and padded:
                move.pad_on_device()


class _PadSource:
    """Writes constant padding into host memory."""

    def __init__(self, spec: InputSpec) -> None:
        self._element = torch.full((1,), spec.pad_value, dtype=spec.dtype)
        octets = bytes(self._element.view(torch.uint8).tolist())
        self._octet = octets[0] if len(set(octets)) == 1 else None
        self._pattern = self._element

    def write(self, base: int, pads: list[tuple[int, int]]) -> None:
        if self._octet is not None:
            for to, size in pads:
                memset(base + to, self._octet, size)
            return
        longest = pads[0][1]
        if self._pattern.nbytes < longest:
            self._pattern = self._element.expand(longest // self._element.nbytes).contiguous()
        pattern = self._pattern.data_ptr()
        for to, size in pads:
            memmove(base + to, pattern, size)


def _repeat(row: int, to: int, row_bytes: int, size: int) -> None:
    """Fill `size` bytes at address `to` with copies of the row at address `row`."""
    if size:
        memmove(to, row, row_bytes)
    done = row_bytes
    while done < size:
        more = min(done, size - done)
        memmove(to + done, to, more)
        done += more


def _has_lazy_bits(value: torch.Tensor) -> bool:
    return value.is_neg() or value.is_conj()
