"""How steps of a model ran: by a graph, or eagerly, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from graphrt.core.base.log import logger
from graphrt.core.capture.limit import LimitReport
from graphrt.core.runner.report import RunnerReport


@dataclass(frozen=True)
class ModelReport:
    """Counts since `with_graphs()`: steps of one token a row (of an encoder, calls: `unit`) that
    graphs `served`, those that ran `eager` by reason, and eager forwards of more tokens
    (`prompts`). `refused` says why the model has no graphs at all; `runner` is the report of its
    graphs. `window` is how many positions sliding layers keep; None: all."""

    served: int
    eager: dict[str, int]
    prompts: int
    refused: str | None
    runner: RunnerReport | None
    window: int | None = None
    unit: str = "steps"

    def __str__(self) -> str:
        steps = [f"  {count:>8}  {reason}" for reason, count in self.eager.items()]
        prompts = f", {self.prompts} prompts" if self.unit == "steps" else ""
        lines = [f"{self.served} {self.unit} by graphs{prompts}"]
        if self.window is not None:
            lines.append(f"sliding layers keep {self.window} positions")
        if self.refused is not None:
            lines.append(f"no graphs: {self.refused}")
        if steps:
            lines += [f"{sum(self.eager.values())} {self.unit} without a graph:", *steps]
        return "\n".join(lines)


@dataclass(frozen=True)
class BatchReport:
    """Counts of batches since `with_batch_graphs()`: those that graphs `served`, those whose graph
    was `captured`, and those that ran `eager`, by reason. `refused` says why the last session has
    no graphs at all; `limits` are the reports of limits, one for each manager."""

    served: int
    captured: int
    eager: dict[str, int]
    refused: str | None
    limits: tuple[LimitReport, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.served} batches by graphs, {self.captured} captured"]
        if self.refused is not None:
            lines.append(f"no graphs: {self.refused}")
        if self.eager:
            batches = [f"  {count:>8}  {reason}" for reason, count in self.eager.items()]
            lines += [f"{sum(self.eager.values())} batches without a graph:", *batches]
        return "\n".join([*lines, *map(str, self.limits)])


class Counts:
    """The counts of one model, as in its report; each reason is logged when it is first met."""

    def __init__(self, model: str) -> None:
        self.served = self.captured = 0
        self.prompts = 0
        self.eager: Counter[str] = Counter()
        self._model = model

    def note(self, reason: str, advice: str = "") -> None:
        """Count one eager step."""
        if reason not in self.eager:
            what = f"{reason}; {advice}" if advice else reason
            logger.warning("%s runs without a graph: %s", self._model, what)
        self.eager[reason] += 1
