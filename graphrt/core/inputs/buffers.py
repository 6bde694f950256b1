"""Static inputs: a runner's buffers, filled and padded for every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphrt.core.base import InvalidBatchError, InvalidInputError, nearest, shown
from graphrt.core.device import Capability, Platform, RingFormat
from graphrt.core.inputs.declared import check_fits, declared_inputs, flat_of
from graphrt.core.inputs.layout import InputLayout, StepMoves
from graphrt.core.inputs.padding_rows import PaddingRows
from graphrt.core.inputs.single_address import FixedInput
from graphrt.core.inputs.spec import check_memory, check_value
from graphrt.core.inputs.transfer import (
    Arrays,
    ByCopy,
    ByFetch,
    InputSlot,
    PadSource,
    Slab,
    SlotViews,
    ring_for,
    views_in,
)

_CACHED_LAYOUTS = 1024
_CACHED_MOVES = 128
"""Per layout: pairs of live tokens and requests."""


class StaticInputs:
    """All inputs of a runner. Nested mappings of specs become dotted names.

    The packed ones share a slab: at each size they lie one after the other, so that all that come
    from the host, padding included, go over in one copy.
    """

    # `NativeReplay` knows where in an object this is.
    __slots__ = ("__dict__", "__weakref__", "turn")

    def __init__(
        self,
        specs: Mapping[str, Any],
        *,
        platform: Platform,
        tokens: int,
        reqs: int,
        device: Any,
        fetched: bool = False,
    ) -> None:
        """`fetched` says that graphs may fetch their inputs, where the platform can."""
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
        # Those without a batch axis: of these a step has all there is.
        self.whole = frozenset(name for name, (axis, _) in self._axes.items() if axis is None)
        # Those that may require a gradient.
        self.graded = [
            name
            for name, spec in self._specs.items()
            if spec.dtype.is_floating_point or spec.dtype.is_complex
        ]
        self.has_requests = any(axis and axis.name == "reqs" for axis, _ in self._axes.values())
        pads = {name: PadSource(spec) for name, spec in self._packed.items()}
        self._layouts: dict[tuple[int, int], InputLayout] = {}
        nbytes = InputLayout(self._packed, tokens, reqs).nbytes
        fetched = fetched and nbytes > 0 and Capability.INPUT_RING in platform.capabilities
        tail = -nbytes % 256 + RingFormat.TAIL_BYTES if fetched else 0
        with torch.inference_mode(False):
            buffer = torch.zeros(nbytes + tail, dtype=torch.uint8, device=device)
        slab = self._slab = Slab(buffer, nbytes)
        self._fixed_starts = {own.buffer.untyped_storage().data_ptr() for own in self._fixed}
        self.ring = ring_for(platform, buffer, nbytes, len(self._packed)) if fetched else None
        self._by_fetch = None if self.ring is None else ByFetch(self.ring, slab, pads)
        # Whether what is packed is all there is, under the names that a step gives it.
        self.all_packed = not self._fixed and not self.nested
        in_place = buffer.is_cpu and self.ring is None
        self._by_copy = ByCopy(slab, pads, None if in_place else platform)
        self._slot_views = SlotViews()
        # Counts what writes the buffers, or takes the memory that they are filled from.
        self.turn = 0
        self.reset()

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers at the largest size by name; packed ones move with the size."""
        return self.layout(self.tokens, self.reqs).views

    @property
    def staging_waits(self) -> int:
        """How often the host had to wait until its staging memory was free."""
        return self._by_copy.waits + (0 if self.ring is None else self.ring.waits)

    def layout(self, tokens: int, reqs: int) -> InputLayout:
        """Where the inputs of a batch of this size lie."""
        found = self._layouts.get((tokens, reqs))
        if found is None:
            found = InputLayout(self._packed, tokens, reqs)
            found.place(self._slab.buffer)
            found.views.update({own.name: own.view(tokens, reqs) for own in self._fixed})
            if self.ring is not None:
                found.fetch = self.ring.fetch_of(found.nbytes)
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
        in_graph: bool = False,
    ) -> None:
        """Copy a step's live rows into the buffers and pad them up to the size of `layout`.

        `stream` is the current one, on platforms that have streams. With `in_graph` the graph that
        is launched next fetches them, and who launches it tells the `ring`.

        Everything is checked before anything is written; raises `InvalidInputError`.
        """
        if type(values) is InputSlot:
            if values.layout is layout and values.moves.live == (tokens, reqs):
                self.fill_from(values, layout, values.moves, stream, in_graph)
                return
            # Its memory may be what is filled next.
            values.check(self.turn)
            values = {name: value.clone() for name, value in values.items()}
        self.turn += 1
        # Free where nothing goes wrong: what a tensor lacks shows when it is used.
        try:
            if self.nested:
                values = dict(flat_of(values))
            if len(values) != len(self._specs):
                self.check_names(values)
            moves = layout.known.get((tokens, reqs))
            if moves is None:
                moves = layout.moves(tokens, reqs, _CACHED_MOVES)
            for own in self._fixed:
                if own.name not in values:
                    self.check_names(values)
                own.check(values[own.name], tokens, reqs)
            if self._fixed:
                values = self._apart(values, tokens, reqs)
            by_fetch, fetch = self._by_fetch, layout.fetch
            if by_fetch is None:
                self._by_copy.fill(values, moves, stream)
            elif fetch is None or not by_fetch.fill(values, moves, fetch, in_graph):
                # Left of a step that failed, it would be fetched over what is copied.
                by_fetch.ring.pending = None
                self._by_copy.fill(values, moves, stream)
                if fetch is not None and in_graph:
                    by_fetch.ring.give_nothing(fetch)
            for own in self._fixed:
                own.fill(values[own.name], tokens, reqs, layout.tokens, layout.reqs)
        except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError) as error:
            self.check(values, tokens, reqs, error)
            raise

    def settle(self) -> None:
        """After captures: no step need wait for them."""
        if self.ring is not None:
            self.ring.settle()

    def slot(self, layout: InputLayout | None, tokens: int, reqs: int) -> InputSlot:
        """Where the host writes the live rows of a step that `fill` then fills `layout` from.
        Without a layout it is memory that has nothing to do with the buffers."""
        if layout is None:
            self.turn += 1
            try:
                tensors = {
                    name: torch.empty(spec.sizes(tokens, reqs), dtype=spec.dtype, device="cpu")
                    for name, spec in self._specs.items()
                }
            except (RuntimeError, TypeError) as error:
                raise InvalidInputError(
                    "there is no memory for a slot of so many rows",
                    got=f"{shown(tokens)} tokens, {shown(reqs)} requests",
                    expected=f"rows that fit the host's memory; graphs have {self.tokens} tokens",
                    advice="split the batch",
                ) from error
            return InputSlot((tensors, Arrays(tensors)), None, None, None, self.turn)
        return self.slot_of(layout, layout.moves(tokens, reqs, _CACHED_MOVES))

    def slot_of(self, layout: InputLayout, moves: StepMoves) -> InputSlot:
        """The same, of which the moves into that layout are known."""
        self.turn += 1
        place: Any
        if self.ring is not None and layout.fetch is not None:
            place, memory = self.ring.take(), self.ring.memory
            at = place[1]
        else:
            place = self._by_copy.take()
            memory = self._slab.buffer if place is None else place.buffer
            at = memory.data_ptr()

        views = self._slot_views.find(at, moves)
        if views is None:
            with torch.inference_mode(False):
                made = views_in(memory, at - memory.data_ptr(), moves)
                made.update({own.name: own.host_rows(*moves.live) for own in self._fixed})
            tensors = {name: made[name] for name in self._specs}
            views = self._slot_views.add(at, moves, tensors)
        return InputSlot(views, place, layout, moves, self.turn)

    def check_alone(self, values: Mapping[str, Any]) -> None:
        """Raise `InvalidInputError` for values that a step was given beside a slot."""
        if values:
            raise InvalidInputError(
                "a step was given inputs beside its slot",
                got=sorted(values),
                expected="all inputs written to the slot",
                advice="slot[name].copy_(value), or slot.numpy[name][:] = array",
            )

    def fill_from(
        self, slot: InputSlot, layout: InputLayout, moves: StepMoves, stream: Any, in_graph: bool
    ) -> None:
        """Fill `layout` from a slot that was taken for it, and for these moves."""
        if slot.turn != self.turn:
            slot.check(self.turn)
        self.turn += 1
        fetch, by_fetch = layout.fetch, self._by_fetch
        if fetch is not None and by_fetch is not None:
            place = by_fetch.ring.take()
            if place != slot.place:
                # A step failed since, and the device said that it was given.
                slot.check(-1)
            by_fetch.give_padded(moves, fetch, *place, in_graph)
        else:
            self._by_copy.give(slot.place, moves, stream)
        for own in self._fixed:
            tokens, reqs = moves.live
            own.fill(slot[own.name], tokens, reqs, layout.tokens, layout.reqs)

    def expect_capture(self, layout: InputLayout) -> None:
        """Before a capture, whose graph is to fetch what is in the buffers of `layout` already."""
        if self.ring is not None and layout.fetch is not None:
            self.ring.expect_capture(layout.fetch)

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
        start, slab = tensor.untyped_storage().data_ptr(), self._slab
        # On the CPU every packed input is a storage of its own, somewhere in the slab.
        return slab.low <= start < slab.high or start in self._fixed_starts

    def reset(self, layout: InputLayout | None = None) -> None:
        """Make every row of `layout`, by default of the largest one, a padding row."""
        self.turn += 1
        if self.ring is not None:
            self.ring.pending = None
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
                advice=_named_right(missing, unknown),
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
                        advice=f"pass {found[axis.name] + axis.extra} rows of {name!r} in "
                        f"dimension {dim}, as the inputs before it have",
                    )
        except (AttributeError, IndexError, RuntimeError, TypeError) as error:
            self.check(values, None, None, error)
            raise
        if not found:
            raise InvalidBatchError(
                "the shapes of the inputs do not say how large the batch is",
                got=f"no batch axis in any of {sorted(self._specs)}",
                expected="the batch itself",
                advice="runner(Batch(num_tokens, num_reqs), ...)",
            )
        reqs = found.get("reqs")
        return found.get("tokens", reqs or 0), reqs

    def _apart(self, values: Mapping[str, Any], tokens: int, reqs: int) -> Mapping[str, Any]:
        """The values of a step, with copies of those that lie in the buffer of another input, or
        elsewhere in their own: filled one after the other, these would be written before they are
        read. What is packed is looked at where it is filled."""
        copies: dict[str, Any] = {}
        for own in self._fixed:
            value = values[own.name]
            in_place = value.data_ptr() == own.view(tokens, reqs).data_ptr()
            if not in_place and self.hold(value):
                copies[own.name] = value.detach().clone()
        for name in self._packed:
            if values[name].untyped_storage().data_ptr() in self._fixed_starts:
                copies[name] = values[name].detach().clone()
        return {**values, **copies} if copies else values

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


def _named_right(missing: list[str], unknown: list[str]) -> str:
    """What to do about inputs that a step lacks, or should not have."""
    found = []
    for name in unknown:
        meant = nearest(name, missing)
        found.append(
            f"pass it as {meant}= in place of {name}="
            if meant
            else f"leave {name}= out: only what inputs= declares is passed"
        )
    if not found:
        found = [f"pass {name}= too" for name in missing]
    return "; ".join(found)
