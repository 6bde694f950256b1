"""How the packed inputs of a step get into their slab.

`InputTransport` is the interface, and writes a slab in the host's own memory. `StagedCopy` is for a
device: the host writes live rows and padding into page-locked memory, which one copy brings over
before the launch, and what is on the device already is copied there. A platform that moves inputs
in another way returns its own from `Platform.new_input_transport`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from graphrt.core.device.contract import DeviceEvent
from graphrt.core.device.platform import Platform
from graphrt.core.inputs.layout import FieldMove, StepMoves, copy_few
from graphrt.core.inputs.spec import LOWEST_ADDRESS, check_value

MAX_SLOTS = 64
"""Steps that can be under way before the host waits for the oldest one's copy; fewer where so many
slots would take more than `MAX_BYTES`."""
MAX_BYTES = 32 << 20
"""The most page-locked memory that the ring slots of one runner take: it cannot be swapped out."""

_CACHED_VIEWS = 1024
"""The most slices of a slab that are kept."""
_Tensor = torch.Tensor
_address_of = torch.Tensor.data_ptr


class Slab:
    """The buffer of all packed inputs: at each size they are packed from its start."""

    def __init__(self, buffer: torch.Tensor, nbytes: int, fields: int) -> None:
        """`nbytes` are those of the largest size, and so many inputs are packed."""

        # To slice it again at each step would cost more than a small copy.
        @lru_cache(_CACHED_VIEWS)
        def view(start: int, end: int) -> torch.Tensor:
            with torch.inference_mode(False):
                return buffer[start:end]

        self.buffer = buffer
        self.view = view
        self.nbytes = nbytes
        self.fields = fields
        self.device = buffer.device
        # Its first address, and the one behind its last.
        self.low = buffer.data_ptr()
        self.high = self.low + nbytes


class InputTransport:
    """Brings the packed inputs of steps into their slab: this one, one in the host's memory."""

    device_memory: Sequence[torch.Tensor] = ()
    """Its device memory beside the slab, to which nodes of graphs that fetch point."""
    ring: Any = None
    """The ring that graphs fetch from, with the methods and the `pending` of `SlotRing`
    (graphrt/cuda/ring/slots.py). None where all inputs are copied before the launch."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        """Where inputs are packed."""

    @property
    def waits(self) -> int:
        """How often the host had to wait until its memory was free."""
        return 0

    def fetch_of(self, nbytes: int) -> Callable[[], None] | None:
        """A call that fetches inputs of so many bytes, now or in the graph that captures it; None
        where they are copied before the launch."""
        return None

    def fill(
        self, values: Mapping[str, Any], moves: StepMoves, stream: Any, in_graph: bool
    ) -> None:
        """Bring a step's live rows and its padding. `stream` is the current one. With `in_graph`
        the graph that is launched next fetches them. Everything is looked at before anything is
        written; raises `InvalidInputError`, or what using a value raises."""
        sources = sources_of(values, moves, self.slab)
        # First, as padding may repeat a live row.
        if "d" in sources.kinds:
            moves.on_device(sources.kinds).copy(sources.tensors)
        copy_rows(moves, sources, self.slab.low)
        if moves.padded:
            moves.pad_at(self.slab.low)


class Sources(NamedTuple):
    """The packed inputs of a step, each with its tensor, its address and a letter of `kinds`.

    "h" is contiguous host memory, "d" is device memory, "k" is kept: it is in the slab already.
    With `used_as_given` all are non-empty, of type `torch.Tensor` itself, and none was copied.
    """

    tensors: list[torch.Tensor]
    addresses: list[int]
    kinds: str
    used_as_given: bool


def sources_of(values: Mapping[str, Any], moves: StepMoves, slab: Slab) -> Sources:
    """Look at all packed inputs of a step before any is written: at once where they are like
    earlier ones, else one by one. An input may be a view of the slab. Raises `InvalidInputError`.
    """
    if moves.like:
        tensors = [*map(values.__getitem__, moves.names)]
        addresses = [*map(_address_of, tensors)]
        for are_alike, kinds, home in moves.like:
            # First what costs less: inputs in place are at these addresses, others are not.
            if (home is None or home == addresses) and are_alike(*tensors):
                if home is None and addresses != moves.last:
                    ordered = sorted(addresses)
                    in_slab = bisect_left(ordered, slab.low) != bisect_left(ordered, slab.high)
                    if in_slab or ordered[0] < LOWEST_ADDRESS:
                        continue
                    moves.last = addresses
                return Sources(tensors, addresses, kinds, True)
    sources = _one_by_one(values, moves, slab)
    if sources.used_as_given:
        moves.expect_like(*sources[:3])
    return sources


def _one_by_one(values: Mapping[str, Any], moves: StepMoves, slab: Slab) -> Sources:
    """`sources_of` for inputs that are unlike earlier ones."""
    low, high = slab.low, slab.high
    tensors: list[torch.Tensor] = []
    addresses: list[int] = []
    kinds, used_as_given = moves.from_host, True
    for number, (name, dtype, shape, lazy, move) in enumerate(moves.rows):
        value = values[name]
        if type(value) is not _Tensor or value.dtype is not dtype or value.shape != shape:
            check_value(name, move.field.spec, value, tuple(shape))
            used_as_given = False
        address = value.data_ptr()
        if address == low + move.field.offset and move.lies_in(value):
            kind = "k"
        else:
            if (
                address < LOWEST_ADDRESS
                or low <= address < high
                or (lazy is not None and lazy(value))
            ):
                value, used_as_given = _readable(value, move, slab), False
                address = value.data_ptr()
            kind = "h" if value.is_cpu else "d"
        if kind != "h":
            kinds = kinds[:number] + kind + kinds[number + 1 :]
        elif not value.is_contiguous():
            value = value.detach().contiguous()
            address, used_as_given = value.data_ptr(), False
        tensors.append(value)
        addresses.append(address)
    return Sources(tensors, addresses, kinds, used_as_given)


def _readable(value: torch.Tensor, move: FieldMove, slab: Slab) -> torch.Tensor:
    """A copy of an input whose memory cannot be read as it is, or is in the slab, where it may be
    overwritten before it is read."""
    if value.data_ptr() < LOWEST_ADDRESS:
        # To read there would end the process. Empty tensors have no address.
        check_value(move.field.name, move.field.spec, value, tuple(move.shape))
    value = value.detach().resolve_conj().resolve_neg()
    return value.clone() if slab.low <= value.data_ptr() < slab.high else value


def copy_rows(moves: StepMoves, sources: Sources, base: int) -> None:
    """Copy the live rows that come from the host into its packed memory at `base`."""
    _, addresses, kinds, _ = sources
    if moves.short is not None and kinds == moves.from_host:
        places, sizes = moves.short
        # `any` runs the map without a loop in Python: each copy returns None, so it does not stop.
        any(map(copy_few, map(base.__add__, places), addresses, sizes))
    else:
        for move, address, kind in zip(moves.fields, addresses, kinds, strict=True):
            if kind == "h":
                move.copy_at(base, address)


class StagedCopy(InputTransport):
    """Copies live rows into the slab of a device, and pads them: all that comes from the host in
    one copy, and what is on the device already in another.

    The host writes a ring slot: page-locked memory, with an event that tells when it is copied
    and may be written again. The ring grows while the device is behind, up to `max_slots`; then the
    host waits.
    """

    waits = 0

    def __init__(self, slab: Slab, platform: Platform, max_slots: int = MAX_SLOTS) -> None:
        super().__init__(slab)
        self._platform = platform
        self._max_slots = max(2, min(max_slots, MAX_BYTES // max(1, slab.nbytes)))
        # Page-locked slabs, the longest unused first, each with the event of its last copy.
        self._slots: deque[tuple[Slab, DeviceEvent | None]] = deque()

    def fill(
        self, values: Mapping[str, Any], moves: StepMoves, stream: Any, in_graph: bool
    ) -> None:
        sources = sources_of(values, moves, self.slab)
        kinds = sources.kinds
        from_host = kinds == moves.from_host
        if "h" in kinds:
            spans = moves.whole if from_host else moves.spans(kinds)
            host, event = self._take()
            copy_rows(moves, sources, host.low)
            moves.pad_at(host.low)
            try:
                for span in spans:
                    self.slab.view(*span).copy_(host.view(*span), non_blocking=event is not None)
            finally:
                if event is not None:
                    event.record(stream)
        if not from_host:
            on_device = moves.on_device(kinds)
            on_device.copy(sources.tensors)
            on_device.pad()

    def _take(self) -> tuple[Slab, DeviceEvent | None]:
        """A ring slot that the host may write now: the oldest, if its copy is over; else a new
        one, or at `max_slots` the oldest after a wait."""
        slots = self._slots
        event = slots[0][1] if slots else None
        if not slots or (event is not None and not event.query()):
            if len(slots) < self._max_slots:
                buffer = self._platform.host_buffer(self.slab.nbytes)
                host = Slab(buffer, self.slab.nbytes, self.slab.fields)
                slots.appendleft((host, self._platform.new_event()))
            elif event is not None:
                self.waits += 1
                event.synchronize()
        slots.rotate(-1)
        return slots[-1]
