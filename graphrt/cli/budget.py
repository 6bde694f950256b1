"""What `graphrt plan` says about streams, bytes and seconds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphrt.core.base import InvalidOptionError, shown
from graphrt.core.batch import GraphMode
from graphrt.core.plan import Budget, GraphCost, Plan

ASCEND = "ascend"
_FIELDS = {
    "streams": "streams",
    "graphs": "graphs",
    "bytes": "device_bytes",
    "seconds": "capture_s",
}
_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_AMOUNT = re.compile(r"(\d{1,18}(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


@dataclass(frozen=True)
class BudgetRequest:
    """What a host knows of its model, and what graphs may take.

    `limits` and `costs` are "streams=1800", "graphs=500", "bytes=2GiB" or "seconds=60"; costs are
    those of one size. `traffic` is "64=0.5": a batch size in tokens and its share of the steps.
    """

    layers: int | None = None
    domains: tuple[str, ...] = ()
    aiv: bool = False
    moe: bool = False
    multi_stream: int = 0
    draft_layers: int = 0
    profile: str | None = None
    device: str | None = None
    limits: tuple[str, ...] = ()
    costs: tuple[str, ...] = ()
    traffic: tuple[str, ...] = ()
    min_piecewise: int = 2


@dataclass(frozen=True)
class Streams:
    """The streams of a device, as a profile counts them."""

    profile: str
    device: str
    usable: int
    full: int
    piecewise: int
    pieces: int
    terms: tuple[tuple[str, int], ...]
    formula_sizes: tuple[int, ...] | None
    """What `update_aclgraph_sizes` keeps of the piecewise sizes; None in the structural model."""

    def lines(self) -> list[str]:
        """The sum, line by line."""
        lines = [f"Streams of {self.device}, profile {self.profile}:"]
        lines += [f"  {streams:+6} {what}" for what, streams in self.terms]
        lines.append(f"  {self.usable:6} usable")
        each = f"{self.piecewise} ({self.pieces} pieces)"
        lines.append(f"  a full graph holds {self.full}, a piecewise size {each}")
        if self.formula_sizes is not None:
            sizes = " ".join(map(str, self.formula_sizes))
            lines.append(f"  update_aclgraph_sizes would keep for pieces: {sizes}")
        return lines


def budget_of(
    request: BudgetRequest, plan: Plan
) -> tuple[Budget | None, dict[int, float] | None, Streams | None]:
    """The budget for `plan`, which has none yet, with the traffic and the streams it rests on.

    No budget where nothing limits the graphs and nothing was asked. Raises `InvalidOptionError` for
    settings that cannot be read or that the platform has not.
    """
    streams = _streams(request, plan)
    limits = _amounts("--budget", request.limits)
    traffic = _traffic(request.traffic) if request.traffic else None
    notes = () if streams is None else tuple(streams.lines())
    if streams is not None:
        limits.setdefault("streams", streams.usable)
        if limits["streams"] != streams.usable:
            notes = (*notes, f"  {limits['streams']:6} by --budget")
    cost = _costs(request, streams)
    if not (limits or request.costs or request.layers):
        return None, traffic, streams
    budget = Budget(**limits, cost=cost, min_piecewise=request.min_piecewise, notes=notes)
    return budget, traffic, streams


def _streams(request: BudgetRequest, plan: Plan) -> Streams | None:
    platform, mode, sizes = plan.platform, plan.mode, plan.sizes
    if platform.name != ASCEND:
        for name in ("profile", "device"):
            if getattr(request, name) is not None:
                raise InvalidOptionError(
                    f"only an NPU has a stream budget to choose a {name} for",
                    got=f"--{name} {getattr(request, name)}, platform {platform.name!r}",
                    expected=f"--platform {ASCEND}",
                    advice="--budget streams=N on other platforms",
                )
        return None
    if request.layers is None:
        return None
    # Late, so that the command starts without the platforms that are not asked about.
    from graphrt.ascend.budget import (
        DEVICES,
        STRUCTURAL,
        Deployment,
        device_named,
        device_of,
        stream_figures,
        update_aclgraph_sizes,
    )
    from graphrt.ascend.driver import available_streams, device_name

    model = Deployment(
        request.layers,
        frozenset(request.domains),
        aiv=request.aiv,
        moe=request.moe,
        multi_stream=request.multi_stream,
        draft_layers=request.draft_layers,
    )
    profile = request.profile or STRUCTURAL
    available = None
    if request.device is not None:
        device = device_named(request.device)
    elif platform.availability().available:
        device = device_of(device_name())
        available = available_streams()
    else:
        device = DEVICES["A2"]
    figures = stream_figures(profile, model, device, available=available)
    kept = None
    if profile != STRUCTURAL and mode.has_piecewise:
        kept = update_aclgraph_sizes(sizes.mixed, model, profile=profile, mode=mode)
    return Streams(
        profile,
        device.name,
        figures.usable,
        figures.full,
        figures.piecewise,
        figures.pieces,
        figures.terms,
        kept,
    )


def _costs(request: BudgetRequest, streams: Streams | None) -> dict[GraphMode, GraphCost]:
    given = _amounts("--cost", request.costs)
    pieces = 1 if request.layers is None else request.layers + 1
    piecewise: dict[str, Any] = {"graphs": pieces}
    full: dict[str, Any] = {}
    if streams is not None:
        piecewise = {"graphs": streams.pieces, "streams": streams.piecewise}
        full = {"streams": streams.full}
    return {
        GraphMode.PIECEWISE: GraphCost(**{**piecewise, **given}),
        GraphMode.FULL: GraphCost(**{**full, **given}),
    }


def _amounts(option: str, texts: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in texts:
        name, _, amount = text.partition("=")
        field = _FIELDS.get(name.strip().lower())
        read = _AMOUNT.fullmatch(amount.strip())
        unit = None if read is None else _UNITS.get(read[2].lower())
        if field is None or read is None or unit is None or (read[2] and field != "device_bytes"):
            raise InvalidOptionError(
                f"{option} cannot be read",
                got=shown(text),
                expected=f"one of {', '.join(_FIELDS)}, and how much",
                advice=f"{option} streams=1000, or {option} bytes=2GiB",
            )
        number = float(read[1]) * unit
        found[field] = number if field == "capture_s" else int(number)
    return found


def _traffic(texts: Sequence[str]) -> dict[int, float]:
    try:
        pairs = [text.split("=") for text in texts]
        return {int(size): float(share) for size, share in pairs}
    except ValueError:
        raise InvalidOptionError(
            "--traffic cannot be read",
            got=" ".join(texts)[:200],
            expected="a batch size in tokens and its share of the steps",
            advice="--traffic 1=0.2 --traffic 64=0.8",
        ) from None
