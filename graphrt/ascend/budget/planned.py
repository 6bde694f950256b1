"""The streams of an NPU that `graphrt plan` counts with: of a deployment, a profile, a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from graphrt.ascend.budget.profiles import Deployment, StreamFigures, update_aclgraph_sizes
from graphrt.ascend.budget.streams import (
    DEVICES,
    STRUCTURAL,
    device_named,
    device_of,
    stream_figures,
)
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.option_values import nearest
from graphrt.core.batch.modes import GraphMode


@dataclass(frozen=True)
class PlannedStreams(StreamFigures):
    """The streams of a device, as a profile counts them: what `graphrt plan --json` prints."""

    device: str
    formula_sizes: tuple[int, ...] | None
    """The piecewise sizes that `update_aclgraph_sizes` keeps; None in the structural model."""

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


def planned_streams(
    settings: Mapping[str, Any],
    layers: int,
    *,
    mode: GraphMode,
    sizes: Sequence[int],
    at_hand: tuple[str, int | None] | None = None,
) -> PlannedStreams:
    """The streams of an NPU for graphs of `layers` layers.

    `settings` are `device` (a generation; by default that of the NPU `at_hand`, else A2), `profile`
    (structural, or the version of the formula) and the figures of `Deployment`, of which `domains`
    may be a text such as "tp,ep". `at_hand` is torch_npu's name of the NPU in this machine, and its
    free streams. Raises `InvalidOptionError` for other settings.
    """
    figures_given = dict(settings)
    device_name = figures_given.pop("device", None)
    profile = str(figures_given.pop("profile", STRUCTURAL))
    figure_names = [field.name for field in fields(Deployment) if field.name != "layers"]
    for name in figures_given.keys() - set(figure_names):
        raise InvalidOptionError(
            "a plan for an NPU has no such setting",
            got=name,
            expected=", ".join(["device", "profile", *figure_names]),
            advice=nearest(name, ["device", "profile", *figure_names]) or "domains=tp",
        )
    domains = figures_given.pop("domains", ())
    if isinstance(domains, str):
        domains = [each.strip().lower() for each in domains.split(",")]
    model = Deployment(layers, frozenset(domains), **figures_given)
    available = None
    if device_name is not None:
        device = device_named(str(device_name))
    elif at_hand is not None:
        device, available = device_of(at_hand[0]), at_hand[1]
    else:
        device = DEVICES["A2"]
    figures = stream_figures(profile, model, device, available=available)
    formula_sizes = None
    if profile != STRUCTURAL and mode.has_piecewise:
        formula_sizes = update_aclgraph_sizes(sizes, model, profile=profile, mode=mode)
    return PlannedStreams(**vars(figures), device=device.name, formula_sizes=formula_sizes)
