"""`graphrt plan`: the mode, the sizes and the graphs of a configuration."""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from graphrt.cli.attention import find_level
from graphrt.cli.budget import ASCEND, BudgetRequest, budget_of
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.option_values import shown
from graphrt.core.base.texts import printable
from graphrt.core.batch.modes import AttentionSupport
from graphrt.core.device.platform import Platform
from graphrt.core.device.registry import get_platform, resolve_platform
from graphrt.core.plan.plan import Plan, PlanArguments
from graphrt.core.plan.resolution import UNNAMED


@dataclass(frozen=True)
class PlanRequest:
    """The options of `graphrt plan`; `attention` are texts that `parse_attention` reads."""

    arguments: PlanArguments
    attention: tuple[str, ...]
    platform: str | None
    strict: bool = False
    save: Path | None = None
    budget: BudgetRequest = field(default_factory=BudgetRequest)


def print_plan(request: PlanRequest, *, as_json: bool) -> None:
    """Print the plan, or its JSON; raises the named errors of bad configurations."""
    attention = parse_attention(request.attention)
    arguments: PlanArguments = {**request.arguments, "attention": attention}
    plan = Plan(**arguments, platform=_planned_for(request.platform))
    budget, traffic, streams = budget_of(request.budget, plan)
    if budget is not None or traffic is not None:
        plan = plan.replace(budget=budget, traffic=traffic)
    if request.strict:
        plan.resolution.refuse_steps()
    if request.save is not None:
        plan.save(request.save)
    if as_json:
        data = {**plan.as_dict(), "streams": None if streams is None else asdict(streams)}
        print(json.dumps(data, indent=2))
        return
    print(plan)
    if plan.platform.name == ASCEND and streams is None and plan.keys:
        note = "streams are not counted; say how many layers the model has: --layers 32"
        print(f"Note: {note}")
    if request.save is not None:
        print(f"Saved to {printable(str(request.save))}")


def parse_attention(texts: tuple[str, ...]) -> dict[str, AttentionSupport]:
    """Levels by backend, the lowest if one is named twice; raises `InvalidOptionError`.

    A text is `LEVEL`, `backend=LEVEL`, or a known backend: `name` or `name:fact=value,...`.
    """
    supports: dict[str, AttentionSupport] = {}
    for text in texts:
        name, support = _declared(text)
        supports[name] = min(support, supports.get(name, support))
    return supports


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
    known_backend, known_level = find_level(text)
    return known_backend.name + colon + facts.strip(), known_level.support


def _unknown_support(level: str, backend: str = "") -> InvalidOptionError:
    return InvalidOptionError(
        "unknown attention support",
        got=shown(level),
        expected=", ".join(AttentionSupport.__members__),
        advice=f"--attention {backend}UNIFORM_BATCH",
    )


def _planned_for(name: str | None) -> Platform:
    """The platform to plan for. An NPU need not be here; other platforms must be available, as the
    plan asks them for figures."""
    if name == ASCEND:
        return get_platform(name, must_be_available=False)
    return resolve_platform(name)
