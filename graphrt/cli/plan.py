"""`graphrt plan`: the mode, the sizes and the graphs of a configuration."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from graphrt.core.errors import InvalidOptionError
from graphrt.core.lookup import resolve_platform
from graphrt.core.modes import (
    AttentionSupport,
    ModeResolution,
    resolve_mode,
)
from graphrt.core.options import GraphOptions
from graphrt.core.sizes import CaptureKey, SizePlan, descriptors_for, plan_sizes


@dataclass(frozen=True)
class PlanRequest:
    """What a host would configure."""

    options: GraphOptions
    max_num_reqs: int
    max_num_tokens: int
    query_lens: tuple[int, ...]
    attention: tuple[str, ...]
    pieces: str | None
    platform: str | None


def print_plan(request: PlanRequest, *, as_json: bool, console: Console | None = None) -> None:
    """Print the plan as tables or JSON; raises the named errors of bad configurations."""
    attention = parse_attention(request.attention)
    resolution = resolve_mode(
        request.options.mode,
        attention=attention,
        query_lens=request.query_lens,
        pieces=request.pieces,
        strict=request.options.strict,
    )
    sizes = plan_sizes(
        max_num_reqs=request.max_num_reqs,
        max_num_tokens=request.max_num_tokens,
        query_lens=request.query_lens,
        sizes=request.options.sizes,
        max_size=request.options.max_size,
        cap=resolve_platform(request.platform).default_max_size(),
    )
    keys = descriptors_for(resolution.mode, sizes)
    if as_json:
        print(json.dumps(as_data(resolution, sizes, keys), indent=2))
    else:
        _show(resolution, sizes, keys, console or Console())


def as_data(
    resolution: ModeResolution, sizes: SizePlan, keys: tuple[CaptureKey, ...]
) -> dict[str, Any]:
    """The plan as plain data."""
    return {
        "requested": resolution.requested.name,
        "mode": resolution.mode.name,
        "steps": [
            {
                "rule": step.rule,
                "from": step.before.name,
                "to": step.after.name,
                "why": step.why,
                "backend": step.backend,
            }
            for step in resolution.steps
        ],
        "sizes": {
            "limit": sizes.limit,
            "mixed": list(sizes.mixed),
            "decode": {str(q): list(ladder) for q, ladder in sizes.decode.items()},
        },
        "eager_decode": eager_decode(sizes, keys),
        "graphs": [
            {
                "mode": mode.name,
                "num_tokens": descriptor.num_tokens,
                "num_reqs": descriptor.num_reqs,
                "uniform": descriptor.uniform,
                "query_len": descriptor.query_len,
            }
            for mode, descriptor in keys
        ],
    }


def eager_decode(sizes: SizePlan, keys: tuple[CaptureKey, ...]) -> list[str]:
    """Decode batches that will be TOO_LARGE for every graph, as sentences."""
    largest = max((descriptor.num_tokens for _, descriptor in keys), default=0)
    found = []
    for query_len in sizes.decode:
        most = min(sizes.max_num_reqs * query_len, sizes.max_num_tokens)
        if most > largest > 0:
            found.append(
                f"decode batches of {largest + 1} to {most} tokens (query length {query_len}) "
                f"will run eagerly; max_size={most} captures them"
            )
    return found


def parse_attention(texts: tuple[str, ...]) -> dict[str, AttentionSupport]:
    """Levels by backend from `LEVEL` or `backend=LEVEL`; raises `InvalidOptionError`."""
    found = {}
    for text in texts:
        backend, _, level = text.rpartition("=")
        try:
            found[backend or "attention"] = AttentionSupport[level.strip().upper()]
        except KeyError:
            raise InvalidOptionError(
                "unknown attention support",
                got=repr(level),
                expected=", ".join(AttentionSupport.__members__),
                advice="--attention UNIFORM_BATCH",
            ) from None
    return found


def _show(
    resolution: ModeResolution,
    sizes: SizePlan,
    keys: tuple[CaptureKey, ...],
    console: Console,
) -> None:
    console.print(f"Mode: {resolution.requested.name} requested, {resolution.mode.name} runs")
    if resolution.steps:
        table = Table(title="Resolution steps", title_justify="left")
        for column in ("rule", "from", "to", "why"):
            table.add_column(column, overflow="fold")
        for step in resolution.steps:
            table.add_row(step.rule, step.before.name, step.after.name, step.why)
        console.print(table)
    table = Table(title=f"Sizes, at most {sizes.limit} tokens", title_justify="left")
    table.add_column("list")
    table.add_column("count", justify="right")
    table.add_column("tokens", overflow="fold")
    rows = [("mixed", sizes.mixed)]
    rows += [(f"decode, query length {q}", ladder) for q, ladder in sizes.decode.items()]
    for name, found in rows:
        table.add_row(name, str(len(found)), " ".join(map(str, found)))
    console.print(table)
    counts = Counter(mode.name for mode, _ in keys)
    total = ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
    console.print(f"Graphs to capture, largest first: {len(keys)} ({total})")
    for warning in eager_decode(sizes, keys):
        console.print(f"Note: {warning}", style="yellow")
