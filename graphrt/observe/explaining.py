"""`explain`: what stands in the way of graphs for a forward, and what they would bring.

1. Capture it as one graph. Each operator that is refused is noted with its line, and the forward is
   captured again in pieces around it, until nothing is refused: then all of them are known.
2. Run steps, the first of which is a trial: does the replay equal the forward?
3. Time steps, by graphs and eagerly on the same live rows.

Inputs are made up: random numbers, and zeros where they are integers. So an operator that only
other values reach is not found.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from graphrt.core.base._warnings import GraphQuarantinedWarning
from graphrt.core.base.errors import CaptureError, GraphRTError
from graphrt.core.base.texts import counted, seconds_text, size_text
from graphrt.core.batch.descriptor import Batch
from graphrt.core.capture.options import GraphOptions
from graphrt.core.device.platform import Platform
from graphrt.core.inputs.spec import InputSpec
from graphrt.core.replay.eager_part import EagerPart
from graphrt.core.runner.runner import GraphRunner

_MOST = 32
"""Operators after which nobody wants to know more."""
_STEPS, _ROUNDS = 20, 7
_LISTED = 6
"""Names in a line."""


@dataclass(frozen=True)
class Obstacle:
    """What no graph can hold: an operator with its line, where they are known."""

    what: str
    advice: str
    op: str | None = None
    source: str | None = None


@dataclass(frozen=True)
class Explanation:
    """What was found out. Without `mode` nothing could be captured."""

    obstacles: tuple[Obstacle, ...]
    mode: str | None = None
    breaks: tuple[str, ...] = ()
    graphs: int = 0
    """Graphs of one step."""
    eager_parts: int = 0
    """What runs between them."""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    trial: str | None = None
    """Why no graph stands for the forward; None if the replay equals it."""
    eager_s: float = 0.0
    graph_s: float = 0.0
    code: str = ""

    def __str__(self) -> str:
        count = len(self.obstacles)
        lines = ["Nothing stands in the way of one graph (FULL)."]
        if count:
            lines = [f"In the way of one graph (FULL): {counted(count, 'operator')}"]
        for number, each in enumerate(self.obstacles, 1):
            where = f" at {each.source}" if each.source else ""
            lines += [f"{number}. {each.op or 'a capture'}{where}", f"   {each.what}"]
            lines.append(f"   try: {each.advice}")
        if self.mode is None:
            return "\n".join([*lines, "Nothing was captured."])
        parts = f"{counted(self.graphs, 'graph')}, {counted(self.eager_parts, 'eager part')}"
        lines.append(f"Captured as {self.mode}: a step is {parts}")
        lines.append(f"It reads: {_listed(self.reads) or 'nothing but its inputs'}")
        lines.append(f"It writes: {_listed(self.writes) or 'nothing'}")
        if self.trial is not None:
            return "\n".join([*lines, f"But no graph stands for it yet: {self.trial}"])
        eager, graph = seconds_text(self.eager_s), seconds_text(self.graph_s)
        gain = f"{self.eager_s / self.graph_s:.2f} times"
        lines.append("The replay equals the forward.")
        lines.append(f"A step takes {eager} eagerly, {graph} by graphs: {gain} as fast.")
        return "\n".join([*lines, "", self.code])


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def explain(
    forward: Callable[..., Any],
    inputs: Mapping[str, InputSpec],
    *,
    tokens: int = 8,
    platform: Platform | str | None = None,
) -> Explanation:
    """Capture `forward` for `tokens` tokens, and try it. Errors that are no refusal of a capture,
    such as those of the forward itself, are raised."""
    obstacles: list[Obstacle] = []
    breaks: list[str] = []
    while True:
        runner = GraphRunner(
            forward,
            mode="PIECEWISE" if breaks else "FULL",
            sizes=[tokens],
            inputs=inputs,
            platform=platform,
            options=GraphOptions(breaks=tuple(breaks)),
        )
        try:
            with torch.no_grad():
                runner.capture()
        except CaptureError as error:
            runner.close()
            advice = error.advice or "capture it in pieces around this"
            obstacles.append(Obstacle(error.what.splitlines()[0], advice, error.op, error.source))
            name = _break_at(error.op)
            if name is None or name in breaks or len(breaks) == _MOST:
                return Explanation(tuple(obstacles))
            breaks.append(name)
            continue
        with runner:
            return _explained(runner, forward, inputs, tokens, tuple(obstacles), tuple(breaks))


def _break_at(op: str | None) -> str | None:
    """`aten.nonzero.default` as `GraphOptions(breaks=)` names it."""
    namespace, _, name = (op or "").partition(".")
    return f"{namespace}::{name.removesuffix('.default')}" if name else None


def _explained(
    runner: GraphRunner[Any],
    forward: Callable[..., Any],
    inputs: Mapping[str, InputSpec],
    tokens: int,
    obstacles: tuple[Obstacle, ...],
    breaks: tuple[str, ...],
) -> Explanation:
    live = max(tokens - 1, 1)
    device = runner.pool.device
    values = {name: _made_up(spec, live, device) for name, spec in inputs.items()}
    batch, sync = Batch(live, live), runner.platform.synchronize
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphQuarantinedWarning)
        failure, by_graph = None, 0.0
        try:
            for _ in range(2):
                runner(batch, **values)
            by_graph = _seconds(lambda: runner(batch, **values), sync)
        except GraphRTError as error:
            # What runs between two segments may return other values, or shapes, than at capture.
            failure = f"{type(error).__name__}: {error}"
        eagerly = _seconds(lambda: forward(**values), sync)
    report = runner.report()
    parts = [part for entry in runner.graphs.entries() for part in entry.parts]
    eager_parts = sum(isinstance(part, EagerPart) for part in parts)
    uses = [(use.name or "memory without a name", use) for use in report.trust.reads]
    failures = (each.failure for each in report.trust.trials if each.failure)
    return Explanation(
        obstacles,
        mode=report.mode.name,
        breaks=breaks,
        graphs=len(parts) - eager_parts,
        eager_parts=eager_parts,
        reads=tuple(f"{name} ({size_text(use.bytes)})" for name, use in uses if not use.written),
        writes=tuple(f"{name} ({size_text(use.bytes)})" for name, use in uses if use.written),
        trial=failure or next(failures, None),
        eager_s=eagerly,
        graph_s=by_graph,
        code=_code(report.mode.name, inputs, tokens, breaks),
    )


def _made_up(spec: InputSpec, rows: int, device: torch.device) -> torch.Tensor:
    # An axis is tokens, rows or reqs, of which there are equally many here, or one of them + 1.
    shape = [
        rows + int(axis.partition("+")[2] or 0) if isinstance(axis, str) else axis
        for axis in spec.shape
    ]
    if spec.dtype.is_floating_point:
        return torch.randn(shape, device=device, dtype=torch.float32).to(spec.dtype)
    return torch.zeros(shape, device=device, dtype=spec.dtype)


def _seconds(step: Callable[[], object], sync: Callable[[], object]) -> float:
    """The median of several rounds, for one step."""
    rounds = []
    for _ in range(_ROUNDS):
        sync()
        began = perf_counter()
        for _ in range(_STEPS):
            step()
        sync()
        rounds.append((perf_counter() - began) / _STEPS)
    return statistics.median(rounds)


def _code(mode: str, inputs: Mapping[str, InputSpec], tokens: int, breaks: tuple[str, ...]) -> str:
    specs = ", ".join(
        f'"{name}": InputSpec({spec.dtype}, {spec.shape!r})' for name, spec in inputs.items()
    )
    options = f", options=GraphOptions(breaks={list(breaks)})" if breaks else ""
    names = "GraphOptions, GraphRunner, InputSpec" if breaks else "GraphRunner, InputSpec"
    return "\n".join(
        [
            f"from graphrt import {names}",
            f'runner = GraphRunner(forward, mode="{mode}", sizes=[{tokens}],',
            f"                     inputs={{{specs}}}{options})",
            "runner.capture()",
        ]
    )
