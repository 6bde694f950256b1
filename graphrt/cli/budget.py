"""What `graphrt plan` says about streams, bytes and seconds."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrt.cli.attention import fact
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.option_values import shown
from graphrt.core.batch.modes import GraphMode
from graphrt.core.plan.budget import Budget, GraphCost
from graphrt.core.plan.memory import GraphMemory, measured_costs
from graphrt.core.plan.plan import Plan
from graphrt.core.plan.sizes import CaptureKey, graph_name
from graphrt.observe.files import runs_of

if TYPE_CHECKING:
    from graphrt.ascend.budget.planned import PlannedStreams
    from graphrt.core.runner.report import RunnerReport

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
    """The options of `graphrt plan` about a budget: facts about the model, limits and costs.

    `npu` are settings such as "device=A3" or "domains=tp,ep", of an NPU alone. `limits` and `costs`
    are "streams=1800", "graphs=500", "bytes=2GiB" or "seconds=60"; costs are those of one size.
    `traffic` is "64=0.5": a batch size in tokens and its share of the steps. `report` is a saved
    report, with what graphs took.
    """

    layers: int | None = None
    npu: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    costs: tuple[str, ...] = ()
    traffic: tuple[str, ...] = ()
    min_piecewise: int = 2
    report: Path | None = None


def budget_of(
    request: BudgetRequest, plan: Plan
) -> tuple[Budget | None, dict[int, float] | None, PlannedStreams | None]:
    """The budget for `plan`, which has none yet, with the traffic and the streams it rests on.

    No budget where nothing limits the graphs and nothing was asked. Raises `InvalidOptionError` for
    settings that cannot be read, or that only another platform has.
    """
    streams = _streams(request, plan)
    limits = _amounts("--budget", request.limits)
    traffic = _traffic(request.traffic) if request.traffic else None
    notes = () if streams is None else tuple(streams.lines())
    if streams is not None:
        limits.setdefault("streams", streams.usable)
        if limits["streams"] != streams.usable:
            notes = (*notes, f"  {limits['streams']:6} by --budget")
    cost: Any = _costs(request, streams)
    if not (limits or request.costs or request.layers or request.report):
        return None, traffic, streams
    if request.report is not None:
        for key, told in costs_of_report(request.report, plan.keys).items():
            device, pool, of_mode = told.device_bytes, told.pool_bytes, cost[key[0]]
            cost[graph_name(key)] = replace(of_mode, device_bytes=device, pool_bytes=pool)
    budget = Budget(**limits, cost=cost, min_piecewise=request.min_piecewise, notes=notes)
    return budget, traffic, streams


def costs_of_report(
    report: RunnerReport | Mapping[str, Any] | str | os.PathLike[str], keys: Iterable[CaptureKey]
) -> dict[CaptureKey, GraphCost]:
    """The bytes of each of these graphs, as a report has them, or predicted from it. Raises
    `InvalidOptionError`."""
    graphs = sorted(runs_of(report)[0].figures["graphs"], key=lambda graph: graph["began_s"])
    planned: dict[str, Any] = {graph_name(key): key for key in keys}
    took: dict[Any, GraphMemory] = {}
    for each in graphs:
        mode, bytes_of = each["mode"], (each["pool_bytes"], each["driver_bytes"])
        key = planned.get(each["graph"], (GraphMode.parse(mode), each["graph"]))
        took[key] = GraphMemory(mode, each["tokens"], *bytes_of)
    if not took or any(each.pool_bytes is None for each in took.values()):
        raise InvalidOptionError(
            "the report does not tell what graphs took",
            got=f"{len(took)} graphs, bytes of the pool unknown" if took else "no graphs",
            expected="a report of a capture on a device that counts bytes",
            advice="runner.capture(); runner.report().save('run.json')",
        )
    return measured_costs(took, planned.values())


def _streams(request: BudgetRequest, plan: Plan) -> PlannedStreams | None:
    platform = plan.platform
    if platform.name != ASCEND:
        if request.npu:
            raise InvalidOptionError(
                "only an NPU has a stream budget to count",
                got=f"--npu {request.npu[0]}, platform {platform.name!r}",
                expected=f"--platform {ASCEND}",
                advice="--budget streams=N on other platforms",
            )
        return None
    if request.layers is None:
        return None
    # Late, so that the command starts without the platforms that are not asked about.
    from graphrt.ascend.budget.planned import planned_streams
    from graphrt.ascend.driver.library import available_streams, device_name

    is_here = platform.availability().available
    return planned_streams(
        dict(map(fact, request.npu)),
        request.layers,
        mode=plan.mode,
        sizes=plan.sizes.mixed,
        at_hand=(device_name(), available_streams()) if is_here else None,
    )


def _costs(request: BudgetRequest, streams: PlannedStreams | None) -> dict[GraphMode, GraphCost]:
    pieces = 1 if request.layers is None else request.layers + 1
    costs = {GraphMode.PIECEWISE: GraphCost(graphs=pieces), GraphMode.FULL: GraphCost()}
    if streams is not None:
        costs = streams.cost
    given = _amounts("--cost", request.costs)
    return {mode: replace(cost, **given) for mode, cost in costs.items()}


def _amounts(option: str, texts: Sequence[str]) -> dict[str, Any]:
    amounts: dict[str, Any] = {}
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
        amounts[field] = number if field == "capture_s" else int(number)
    return amounts


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
