"""What `torch.accelerator` and the device's own module offer: graphs, memory, snapshots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphrt.core.base.errors import MissingTorchNameError
from graphrt.core.base.texts import error_text
from graphrt.core.device.platform import Availability
from graphrt.core.device.pool_memory import weak_alias

Snapshot = Callable[[], Sequence[Mapping[str, Any]]]
"""The segments of the device's allocator: `address`, `total_size`, `device`, `segment_pool_id`."""

OWN_PLATFORM = {"cuda": "cuda", "npu": "ascend"}
"""Devices whose platform of their own can do more, by device type."""


def device_type() -> str | None:
    """The type of the accelerator that torch was built for or that an extension registered."""
    # Asked this way because a torch that is too old may have no torch.accelerator at all.
    accelerator = getattr(torch, "accelerator", None)
    device = accelerator.current_accelerator() if accelerator is not None else None
    return None if device is None else str(device.type)


def availability() -> Availability:
    """Whether the accelerator has graphs that no other platform serves. Never raises."""
    try:
        return _availability()
    except Exception as error:
        return Availability(False, f"torch.accelerator failed: {_first_line(error)}")


def _availability() -> Availability:
    if not hasattr(getattr(torch, "accelerator", None), "Graph"):
        return Availability(
            False, f"torch {torch.__version__} has no torch.accelerator.Graph (2.12 or newer has)"
        )
    kind = device_type()
    if kind is None:
        return Availability(False, f"torch {torch.__version__} knows of no accelerator here")
    if kind in OWN_PLATFORM:
        return Availability(
            False,
            f"the accelerator is {kind}, which has a platform of its own: {OWN_PLATFORM[kind]}",
        )
    if not torch.accelerator.is_available():
        return Availability(False, f"torch supports {kind}, but no such device is available")
    try:
        torch.accelerator.Graph()
    except Exception as error:
        return Availability(False, f"{kind} has no graphs: {_first_line(error)}")
    return Availability(True)


def _first_line(error: BaseException) -> str:
    lines = error_text(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def memory_info() -> tuple[int, int] | None:
    """Free and total bytes of the current device, or None where the device does not say."""
    try:
        free, total = torch.accelerator.get_memory_info()
    except (AttributeError, RuntimeError):  # torch 2.12 may lack it, and a device may refuse
        return None
    return free, total


def pool_snapshot(kind: str) -> Snapshot | None:
    """A function that lists the allocator's segments with their pools, by which graph memory is
    recognised; None unless a probe shows that it and `weak_alias` work.

    `torch.accelerator` has no such function, but a device's module may, as `torch.xpu` does.
    """
    try:
        read: Snapshot = torch.get_device_module(kind).memory_snapshot
        probe = torch.ones(3, dtype=torch.uint8, device=kind)
        address = probe.untyped_storage().data_ptr()
        is_listed = any(
            "segment_pool_id" in segment
            and "device" in segment
            and 0 <= address - segment["address"] < segment["total_size"]
            for segment in read()
        )
        weak = weak_alias(probe[1:])
        works = weak.data_ptr() == probe[1:].data_ptr() and weak.cpu().tolist() == [1.0, 1.0]
    except (
        AssertionError,
        AttributeError,
        KeyError,
        MissingTorchNameError,
        RuntimeError,
        TypeError,
    ):
        # A missing operator, another form of snapshot, a device that torch was built without: core
        # then keeps strong references.
        return None
    return read if is_listed and works else None
