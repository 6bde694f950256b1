"""Settings of a command line, as arguments of a plan and options of a runner."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from graphrt.core.base.option_values import check_keys
from graphrt.core.base.settings import read_settings
from graphrt.core.capture.options import GraphOptions
from graphrt.core.plan.plan import PlanArguments

# Compiled modules and budgets cannot be written in one value.
WRITTEN = tuple(
    name for name in PlanArguments.__annotations__ if name not in ("compiled", "budget", "traffic")
)


def runner_settings(settings: Iterable[str]) -> tuple[PlanArguments, GraphOptions]:
    """Arguments of `Plan` and `GraphOptions` from "key=value" settings; later ones win.

    Raises `InvalidOptionError` for a name that is of neither, or a wrong value.
    """
    values = read_settings(settings)
    arguments: dict[str, Any] = {name: values.pop(name) for name in WRITTEN if name in values}
    check_keys(values, GraphOptions, like=WRITTEN)
    return cast(PlanArguments, arguments), GraphOptions.from_dict(values)
