"""A run with three planted faults: a graph in quarantine, batches that always pad to double, and
batches that are larger than every graph."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from graphrt import Batch, GraphRunner, InputSpec, current_context
from graphrt.core.base.errors import GraphQuarantinedWarning

PADDED, TOO_LARGE, MIXED = 12, 7, 3
"""Steps with each fault."""
SIZES = [2, 4, 16]


def planted_runner(weight: torch.Tensor | None = None) -> GraphRunner[torch.Tensor]:
    """A captured runner; its batches of the variant "mixed" mix rows, as a mean over all does."""
    table = torch.eye(8) if weight is None else weight

    def forward(x: torch.Tensor) -> torch.Tensor:
        context = current_context()
        descriptor = None if context is None else context.descriptor
        if descriptor is not None and descriptor.variant == "mixed":
            return x - x.mean(0)
        return x @ table

    runner = GraphRunner(
        forward,
        mode="FULL",
        sizes=SIZES,
        variants=[None, "mixed"],
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 8),
        platform="cpu",
    )
    runner.capture()
    return runner


def step(runner: GraphRunner[Any], tokens: int, variant: str | None = None) -> None:
    values = torch.arange(tokens * 8.0).reshape(tokens, 8)
    runner(Batch(tokens, variant=variant), x=values)


def run_planted(runner: GraphRunner[Any]) -> None:
    """Steps without a fault, and those with one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphQuarantinedWarning)
        for tokens in (2, 4, 2, 4):
            step(runner, tokens)
        for _ in range(PADDED):
            step(runner, 8)
        for _ in range(TOO_LARGE):
            step(runner, 20)
        for _ in range(MIXED):
            step(runner, 3, "mixed")


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value and of each key in plain data; a key's ends with None."""
    children: Any = ()
    if isinstance(data, (dict, list)):
        children = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in children:
        yield (*path, key)
        if isinstance(data, dict):
            yield (*path, key, None)
        yield from places(value, (*path, key))


def short_document(path: Path) -> dict[str, Any]:
    """A saved trace with two graphs, and one event of each kind, as all have the same fields."""
    document: dict[str, Any] = json.loads(path.read_text())
    kinds = {(event["ph"], event.get("tid")): event for event in document["traceEvents"]}
    document["traceEvents"] = [*kinds.values()]
    (report,) = document["otherData"]["graphrt_reports"]
    report["graphs"] = report["graphs"][:2]
    return document
