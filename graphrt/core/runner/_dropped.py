"""Graphs that a device has no room for: which, why, and how the host is told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphrt.core.base._warnings import GraphsDroppedWarning, warn_caller
from graphrt.core.base.errors import ResourceExhaustedError
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.plan.text import alike


@dataclass(frozen=True)
class DroppedGraph:
    """A graph that did not fit on the device; its sizes run eagerly."""

    mode: GraphMode
    descriptor: BatchDescriptor
    reason: str


def tell_dropped(dropped: Sequence[DroppedGraph], planned: int, *, strict: bool) -> None:
    """Warn of graphs that did not fit on the device, or raise `ResourceExhaustedError`."""
    lines = dropped_lines(dropped)
    if strict:
        raise ResourceExhaustedError(
            f"{len(dropped)} of {planned} graphs did not fit on the device",
            got="".join(f"\n  {line}" for line in lines),
            expected="every planned graph (strict=True)",
            advice="capture fewer sizes, or leave the KV cache less memory; what is captured "
            "serves",
        )
    warn_caller(
        f"{len(dropped)} of {planned} graphs did not fit on the device, and batches that no other "
        "serves run eagerly:" + "".join(f"\n  {line}" for line in lines),
        GraphsDroppedWarning,
    )


def dropped_lines(dropped: Iterable[DroppedGraph]) -> list[str]:
    """A line for each reason: the first of its graphs, and how many more there are."""
    by_reason: dict[tuple[GraphMode, str], list[BatchDescriptor]] = {}
    for each in dropped:
        by_reason.setdefault((each.mode, each.reason), []).append(each.descriptor)
    lines = []
    for (mode, reason), (first, *others) in by_reason.items():
        more = f"; {alike(others)}" if others else ""
        text = "; ".join(part.strip() for part in reason.splitlines())
        lines.append(f"{mode.name} [{first}]: {text}{more}")
    return lines
