"""Plans as files: what a plan was made from, and what it printed.

A file holds the arguments of the plan, the platform and the versions that it was made with, and the
printed plan. `Plan.load` resolves the arguments again on this device; what came out differently is
the difference of the two printed plans, line by line. What was resolved is never read back.
"""

from __future__ import annotations

import ast
import json
import os
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch

from graphrt._version import __version__
from graphrt.core.base import errors
from graphrt.core.base.files import read_bounded, write_whole
from graphrt.core.base.option_values import refused, shown
from graphrt.core.plan.budget import Budget, GraphCost, LeftOut, PlannedCapture

T = TypeVar("T")

FORMAT = 4
"""The version of the file; another one is refused."""

_MOST_BYTES = 1 << 26
"""The most that is read of a file: more than the largest plan takes, and less than would fill the
memory if the path is of something else."""


def plain_arguments(arguments: Any) -> dict[str, Any]:
    """The arguments of a plan in JSON's types, without compiled modules.

    Raises `InvalidOptionError` for variants that Python has no literal of.
    """
    plain = {name: value for name, value in arguments.items() if name != "compiled"}
    plain["variants"] = [_literal(variant) for variant in arguments["variants"]]
    return in_json(plain)  # type: ignore[no-any-return]


def in_json(value: Any) -> Any:
    """`value` in JSON's types: enums by their names, records as dicts."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (Budget, GraphCost)):
        value = vars(value)
    if isinstance(value, (PlannedCapture, LeftOut)):
        fields = value._asdict()
        of_graph, cost = fields.pop("descriptor")._asdict(), vars(fields.pop("cost"))
        value = {"mode": value.mode, **of_graph, **cost, **fields}
    if isinstance(value, Mapping):
        return {str(in_json(key)): in_json(each) for key, each in value.items()}
    return [in_json(each) for each in value] if isinstance(value, (list, tuple)) else value


def given_arguments(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Plan` from those of `plain_arguments`."""
    budget, traffic, lengths = plain["budget"], plain["traffic"], plain["query_lens"]
    if budget is not None:
        cost = budget["cost"]
        costs = cost and {mode: GraphCost(**each) for mode, each in cost.items()}
        budget = Budget(**{**budget, "cost": costs})
    return {
        **plain,
        "variants": [ast.literal_eval(variant) for variant in plain["variants"]],
        "budget": budget,
        "traffic": traffic and {int(size): share for size, share in traffic.items()},
        "query_lens": {int(most): each for most, each in lengths.items()}
        if isinstance(lengths, Mapping)
        else lengths,
    }


def _literal(variant: Hashable) -> str:
    """A variant as Python writes it, which is read back as an equal one."""
    with suppress(Exception):  # what the host's own repr() or == raises, too
        text = repr(variant)
        if ast.literal_eval(text) == variant:
            return text
    expected = "a string, an int, or a tuple of them, not nested deeply"
    advice = "name the variant with a string"
    raise refused("a plan with this variant cannot be saved", variant, expected, advice)


def differences(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """Lines of one printed plan that the other has not, "- " before and "+ " now."""
    gone, new = Counter(before) - Counter(now), Counter(now) - Counter(before)
    return [*(f"- {line}" for line in gone.elements()), *(f"+ {line}" for line in new.elements())]


def warn_changed(what: object, changed: Sequence[str]) -> None:
    """Warn that a plan comes out differently here, if it does."""
    if changed:
        lines = "\n  ".join(changed)
        text = f"the plan of {what} comes out differently here:\n  {lines}"
        errors.warn_caller(text, errors.PlanChangedWarning)


def write(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write a plan to a file, whole or not at all; raises `PlanFileError`."""
    versions = f"graphrt {__version__}, torch {torch.__version__}"
    head = {"graphrt_plan": FORMAT, "made_with": versions}
    text = json.dumps({**head, **content}, indent=2) + "\n"
    write_whole(path, text, what="the plan", error=errors.PlanFileError)


def read(
    path: str | os.PathLike[str], plan_of: Callable[[dict[str, Any]], T]
) -> tuple[T, list[str], str]:
    """The plan that `plan_of` makes of the arguments in a file; the lines that the plan printed
    when it was written; and the versions that it was made with.

    Raises `PlanFileError` for a file that `write` did not write, and for arguments that are none.
    """
    try:
        content = json.loads(read_bounded(Path(path), _MOST_BYTES))
        version = content["graphrt_plan"]
        if version != FORMAT:
            got = f"format {shown(version)}, not format {FORMAT}"
            raise ValueError(f"{got}: another graphrt wrote it")
        plan = plan_of(given_arguments(content["arguments"]))
        return plan, list(map(str, content["printed"])), str(content["made_with"])[:200]
    except Exception as error:
        # A file that was written by hand may fail anywhere in a plan.
        raise errors.PlanFileError(
            f"{shown(path)} is no plan that can be used",
            got=f"{type(error).__name__}: {error}"[:500],
            expected="what Plan.save wrote",
            advice="save it again: graphrt plan --save PATH, or Plan(...).save(path)",
        ) from error
