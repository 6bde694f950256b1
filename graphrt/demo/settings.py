"""Settings of a command line, as arguments of a plan and options of a runner."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, cast

from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.option_values import check_keys, shown
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


def read_settings(settings: Iterable[str]) -> dict[str, object]:
    """Names and values of "key=value" settings, such as `-c` gives; later ones win.

    A value is JSON or a Python literal if it parses as such, else a string. Raises
    `InvalidOptionError`.
    """
    values: dict[str, object] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise InvalidOptionError(
                "a setting needs a key and a value",
                got=shown(setting),
                expected="key=value",
                advice="mode=FULL, sizes=[1,2,4] or outputs=clone",
            )
        values[key.strip()] = _value_of(text.strip())
    return values


def _value_of(text: str) -> object:
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return cast(object, read(text))
    return text
