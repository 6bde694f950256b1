"""`graphrt plan`: the mode, the sizes and the graphs of a configuration."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from graphrt.cli import budget
from graphrt.cli.attention import find_level
from graphrt.cli.budget import BudgetRequest
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.batch.modes import AttentionSupport
from graphrt.core.capture.options import GraphOptions
from graphrt.core.device.lookup import resolve_platform
from graphrt.core.device.platform import Platform
from graphrt.core.device.registry import get_platform
from graphrt.core.plan.budget import CapturePlan
from graphrt.core.plan.resolution import resolve_mode
from graphrt.core.plan.sizes import CaptureKey, SizePlan, descriptors_for, plan_sizes

UNNAMED = "attention"


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
    budget: BudgetRequest = field(default_factory=BudgetRequest)


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
    platform = _planned_for(request.platform)
    sizes = plan_sizes(
        max_num_reqs=request.max_num_reqs,
        max_num_tokens=request.max_num_tokens,
        query_lens=request.query_lens,
        sizes=request.options.sizes,
        max_size=request.options.max_size,
        cap=platform.default_max_size(),
    )
    keys = descriptors_for(resolution.mode, sizes)
    found, streams = budget.fit(
        request.budget, platform, resolution, sizes, keys, strict=request.options.strict
    )
    if as_json:
        print(json.dumps(as_data(found, sizes, streams, attention), indent=2))
        return
    console = console or Console()
    _show(found, sizes, attention, console)
    for line in budget.budget_lines(request.budget, found, streams):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if platform.name == budget.ASCEND and streams is None and keys:
        note = "streams are not counted; say how many layers the model has: --layers 32"
        console.print(f"Note: {note}", style="yellow")


def as_data(
    found: CapturePlan,
    sizes: SizePlan,
    streams: budget.Streams | None,
    attention: Mapping[str, AttentionSupport],
) -> dict[str, Any]:
    """The plan as plain data."""
    resolution = found.resolution
    return {
        "requested": resolution.requested.name,
        "mode": resolution.mode.name,
        "attention": {name: support.name for name, support in attention.items()},
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
        "eager_decode": eager_decode(sizes, found.keys),
        **budget.as_data(found, streams),
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
    """Levels by backend, the lowest of those given for one; raises `InvalidOptionError`.

    A text is `LEVEL`, `backend=LEVEL`, or a known backend: `name` or `name:fact=value,...`.
    """
    found: dict[str, AttentionSupport] = {}
    for text in texts:
        name, support = _declared(text)
        found[name] = min(support, found.get(name, support))
    return found


def _declared(text: str) -> tuple[str, AttentionSupport]:
    backend, equals, level = text.rpartition("=")
    support = AttentionSupport.__members__.get(level.strip().upper())
    if support is not None:
        return backend.strip() or UNNAMED, support
    _, colon, facts = text.partition(":")
    if equals and not colon:
        raise _unknown_support(level, f"{backend}=")
    if not colon and difflib.get_close_matches(level.upper(), AttentionSupport.__members__):
        raise _unknown_support(level)
    known, known_level = find_level(text)
    return known.name + colon + facts.strip(), known_level.support


def _unknown_support(level: str, backend: str = "") -> InvalidOptionError:
    return InvalidOptionError(
        "unknown attention support",
        got=repr(level),
        expected=", ".join(AttentionSupport.__members__),
        advice=f"--attention {backend}UNIFORM_BATCH",
    )


def _planned_for(name: str | None) -> Platform:
    """An NPU's graphs are planned on any machine; other platforms are asked for their figures."""
    if name == budget.ASCEND:
        return get_platform(name, must_be_available=False)
    return resolve_platform(name)


def _show(
    found: CapturePlan,
    sizes: SizePlan,
    attention: Mapping[str, AttentionSupport],
    console: Console,
) -> None:
    resolution, keys = found.resolution, found.keys
    console.print(f"Mode: {resolution.requested.name} requested, {resolution.mode.name} runs")
    for name, support in attention.items():
        backend = "" if name == UNNAMED else f"{name} supports "
        console.print(f"Attention: {backend}{support.name}", markup=False, highlight=False)
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
    for name, listed in rows:
        table.add_row(name, str(len(listed)), " ".join(map(str, listed)))
    console.print(table)
    counts = Counter(mode.name for mode, _ in keys)
    total = ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
    console.print(f"Graphs to capture, largest first: {len(keys)} ({total})")
    for warning in eager_decode(sizes, keys):
        console.print(f"Note: {warning}", style="yellow")
