"""How many streams of an NPU graphs hold: by structure, by measurement, or by the old formula.

The structural model follows the rules of the CANN runtime; no NPU was at hand to confirm it. What
a device has left can be asked at run time, which goes before any model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphrt.ascend.budget.profiles import Deployment, StreamFigures, profile_named
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.option_values import shown
from graphrt.core.device.contract import GraphWork, StreamRoom

STRUCTURAL = "structural"

TORCH_NPU_STREAMS = 34
"""Streams that torch_npu takes for itself: two at the start, 32 with the first `Stream()`."""
RESERVED_STREAMS = 48
"""Kept free by default: the 32 that torch_npu makes for its other priority, and some slack."""
OPERATOR_ENTRIES = 2
"""Queue entries of an operator, on average and at most: most launch one kernel, some a few."""
SCARCE_STREAMS = 256
"""With fewer free streams a capture may well run out of them in its middle."""
DOMAIN_STREAMS = 2
"""Side streams of a communication domain whose collectives are not on vector cores."""

_QUEUE_HEADROOM = 32


@dataclass(frozen=True)
class Device:
    """The limits of a generation of NPUs for captures; queue entries are SQEs, one for a kernel."""

    name: str
    prefixes: tuple[str, ...]
    """Prefixes of torch_npu's names of such devices."""
    streams: int
    """Documented streams of a device, shared by all processes on it."""
    queue_depth: int = 2048
    """Entries of a stream's queue."""
    queue_headroom: int = _QUEUE_HEADROOM
    """Entries of it that a capture leaves free."""
    wait_entries: int = 4
    """Entries of waiting for an external event."""
    group_entries: int = 8
    """Entries that beginning a task group puts in front of the task."""
    captures: bool = True
    also: tuple[str, ...] = ()
    """Other names of the generation."""

    @property
    def stream_entries(self) -> int:
        """Entries after which a capture goes on in one more (cascade) stream."""
        return self.queue_depth - self.queue_headroom

    @property
    def task_entries(self) -> int:
        """Entries that an updatable task takes besides its kernels: wait, signal taken, group."""
        return self.wait_entries + 1 + self.group_entries


# Queue figures of 310P, 310B and 910A are those of A2: none are published.
DEVICES = {
    device.name: device
    for device in (
        Device("A3", ("Ascend910_93",), 1984),
        Device(
            "950",
            ("Ascend950", "Ascend910_95"),
            1984,
            2049,
            _QUEUE_HEADROOM + 8,
            wait_entries=3,
            also=("A5",),
        ),
        Device("310P", ("Ascend310P",), 1024, group_entries=10),
        Device("310B", ("Ascend310B",), 512, captures=False),
        Device("910A", ("Ascend910A", "Ascend910ProA"), 2048, captures=False),
        Device("A2", ("Ascend910B", "Ascend910"), 1984),
    )
}
"""Generation -> device, in the order in which prefixes are tried."""


def device_of(name: str) -> Device:
    """The generation of a device by torch_npu's name for it; an unknown one counts as A2."""
    devices = (each for each in DEVICES.values() if name.startswith(each.prefixes))
    return next(devices, DEVICES["A2"])


def device_named(name: str) -> Device:
    """The generation of that name, in any case; raises `InvalidOptionError`."""
    names = {each: device for device in DEVICES.values() for each in (device.name, *device.also)}
    for each, device in names.items():
        if each.lower() == name.strip().lower():
            return device
    raise InvalidOptionError(
        "unknown generation of NPUs",
        got=shown(name),
        expected=", ".join(names),
        advice="A2 for Ascend 910B, A3 for Ascend 910_93",
    )


def graph_streams(entries: Sequence[int], device: Device) -> int:
    """Streams that one captured graph holds until it is destroyed.

    `entries` are the queue entries of each stream that takes part: the capture's own and every
    side stream that joined it. Each is captured into a stream of its own, and into one more
    whenever the last is full. Exact for tasks of one entry, an upper bound for larger ones.
    Source: the rules of the CANN runtime; a cascade may itself take an entry, which is not counted.
    """
    return sum(-(-max(1, each) // device.stream_entries) for each in entries)


def streams_needed(work: GraphWork, device: Device) -> int:
    """The most streams that graphs of a forward hold together, by the work that a warm-up issued.

    A warm-up does not show which graphs use which side stream, so each counts as using all of them.
    Each operator counts as `OPERATOR_ENTRIES` kernels.
    """
    entries = OPERATOR_ENTRIES * sum(work.operators.values()) + device.task_entries * work.tasks
    streams = max(1, len(work.operators))
    # A stream that is full goes on in one more, however entries are spread over the streams.
    return work.graphs * streams + entries // device.stream_entries


def stream_room(free: int, reserve: int | None = None) -> StreamRoom:
    """How many of the free streams graphs may take. `reserve` of them stay free: by default
    `RESERVED_STREAMS`, which torch_npu may still need, or a tenth of `free` if that is less."""
    if reserve is None:
        reserve = min(RESERVED_STREAMS, free // 10)
    return StreamRoom(free, reserve)


def structural_figures(
    model: Deployment,
    device: Device,
    *,
    available: int | None = None,
    reserve: int = RESERVED_STREAMS,
) -> StreamFigures:
    """Streams of full and piecewise graphs by the structure of the model.

    `available` are the streams that are free now, if they were asked for; without, those that
    torch_npu takes are assumed to be the only ones in use. `reserve` is kept free. Every side
    stream is assumed to take part in every piece. Where the device's queues are in software
    (newer CANN and driver), captured graphs hold far fewer streams than this.
    """
    own_queue = model.other_kernels + _layers(model, model.layers, device)
    side = model.multi_stream
    if not model.aiv:
        side += DOMAIN_STREAMS * len(model.domains)
    full = graph_streams([own_queue, *[1] * side], device)
    if model.draft_layers:
        draft = _layers(model, model.draft_layers, device)
        full += graph_streams([draft, *[1] * side], device)
    piece = graph_streams([model.kernels_per_layer, *[1] * side], device)
    if available is None:
        terms = [
            (f"documented for {device.name}", device.streams),
            ("torch_npu's own", -TORCH_NPU_STREAMS),
        ]
    else:
        terms = [("free on this device now", min(available, device.streams))]
    if reserve:
        terms.append(("kept in reserve", -reserve))
    usable = max(0, sum(streams for _, streams in terms))
    pieces = model.pieces
    return StreamFigures(STRUCTURAL, usable, full, piece * pieces, pieces, tuple(terms))


def stream_figures(
    profile: str, model: Deployment, device: Device, *, available: int | None = None
) -> StreamFigures:
    """The figures of the structural model, or of the old formula in the version `profile`.

    Raises `InvalidOptionError` for an unknown profile.
    """
    if profile == STRUCTURAL:
        return structural_figures(model, device, available=available)
    return profile_named(profile).figures(model)


def _layers(model: Deployment, layers: int, device: Device) -> int:
    return layers * (model.kernels_per_layer + model.tasks_per_layer * device.task_entries)
