"""Plans as files: what a plan was made from, and what it printed.

A file holds the arguments of the plan, the platform and the versions that it was made with, and the
printed plan. `Plan.load` resolves the arguments again on this device; what came out differently is
the difference of the two printed plans, line by line. What was resolved is never read back.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from graphrt._version import __version__
from graphrt.core.base._warnings import PlanChangedWarning, warn_caller
from graphrt.core.base.errors import InvalidOptionError, PlanFileError
from graphrt.core.base.option_values import shown
from graphrt.core.base.settings import read_bounded
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode, PieceProvider
from graphrt.core.plan.arguments import PlanArguments
from graphrt.core.plan.budget import (
    RESOURCES,
    Budget,
    CostModel,
    GraphCost,
    LeftOut,
    PlannedCapture,
)
from graphrt.core.plan.resolution import SavedFacts

FORMAT = 2
"""The version of the file; another one is refused."""

_MOST_BYTES = 1 << 26
"""Of a file, which is more than the largest plan takes."""

_DEEPEST = 28
"""Tuples in tuples, of a variant. Fixed, as what Python recurses through depends on the caller's
depth and on its recursion limit."""


def plain_arguments(
    arguments: PlanArguments, graphs: Sequence[PlannedCapture | LeftOut]
) -> dict[str, Any]:
    """What a plan was made from, in JSON's types; `graphs` are all that its budget was asked of.

    Raises `InvalidOptionError` for variants that are no strings, ints or tuples of them.
    """
    compiled, budget = arguments["compiled"], arguments["budget"]
    plain: dict[str, Any] = {
        **arguments,
        "compiled": [SavedFacts(each.graphs, each.provides, each.whole_graph) for each in compiled],
        "variants": [_plain_variant(variant) for variant in arguments["variants"]],
    }
    if budget is not None and callable(budget.cost):
        # A function cannot be saved, but what it said can.
        plain["budget"] = {**vars(budget), "cost": [each[:3] for each in graphs]}
    return in_json(plain)  # type: ignore[no-any-return]


def in_json(value: Any) -> Any:
    """`value` in JSON's types: enums by their names, records as dicts."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (Budget, GraphCost, SavedFacts)):
        value = vars(value)
    elif isinstance(value, BatchDescriptor):
        value = {**value._asdict(), "variant": _plain_variant(value.variant)}
    if isinstance(value, Mapping):
        return {str(in_json(key)): in_json(each) for key, each in value.items()}
    return [in_json(each) for each in value] if isinstance(value, (list, tuple)) else value


def given_arguments(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Plan` from those of `plain_arguments`."""
    budget, traffic = plain["budget"], plain["traffic"]
    return {
        **plain,
        "compiled": [
            SavedFacts(**{**each, "provides": PieceProvider.parse(each["provides"])})
            for each in plain["compiled"]
        ],
        "variants": [_given_variant(variant) for variant in plain["variants"]],
        "budget": None if budget is None else Budget(**{**budget, "cost": _given_cost(**budget)}),
        "traffic": traffic and {int(size): share for size, share in traffic.items()},
    }


def _plain_variant(variant: Hashable, deepest: int = _DEEPEST) -> Any:
    if variant is None or type(variant) in (str, int):
        return variant
    if type(variant) is tuple and deepest:
        return [_plain_variant(each, deepest - 1) for each in variant]
    raise InvalidOptionError(
        "a plan with this variant cannot be saved",
        got=shown(variant),
        expected=f"a string, an int, or a tuple of them, nested {_DEEPEST} times at most",
        advice="name the variant with a string",
    )


def _given_variant(plain: Any, deepest: int = _DEEPEST) -> Hashable:
    if not isinstance(plain, list):
        return plain  # type: ignore[no-any-return]
    if not deepest:
        raise ValueError(f"lists nested deeper than {_DEEPEST}")
    return tuple(_given_variant(each, deepest - 1) for each in plain)


def _given_cost(cost: Any, **_: Any) -> CostModel | dict[str, GraphCost] | None:
    if not isinstance(cost, list):
        return cost and {mode: GraphCost(**each) for mode, each in cost.items()}
    costs = {
        (GraphMode[mode], _given_descriptor(**descriptor)): GraphCost(**each)
        for mode, descriptor, each in cost
    }

    def as_told(mode: GraphMode, descriptor: BatchDescriptor) -> GraphCost:
        known = costs.get((mode, descriptor))
        if known is not None:
            return known
        # The function that knew is gone: a graph that it was not asked about takes no less than
        # any of its mode did.
        alike = [each for key, each in costs.items() if key[0] is mode] or [GraphCost()]
        return GraphCost(*(max(getattr(each, name) for each in alike) for name in RESOURCES))

    return as_told


def _given_descriptor(bounds: Any, variant: Any, **counts: Any) -> BatchDescriptor:
    return BatchDescriptor(**counts, bounds=tuple(bounds), variant=_given_variant(variant))


def fingerprint(plain: Mapping[str, Any]) -> str:
    """16 hexadecimal digits over a plan in JSON's types."""
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """Lines of one printed plan that the other has not, "- " before and "+ " now."""
    gone, new = Counter(before) - Counter(now), Counter(now) - Counter(before)
    return [*(f"- {line}" for line in gone.elements()), *(f"+ {line}" for line in new.elements())]


def warn_changed(what: object, changed: Sequence[str]) -> None:
    """Warn that a plan comes out differently here."""
    lines = "\n  ".join(changed)
    warn_caller(f"the plan of {what} comes out differently here:\n  {lines}", PlanChangedWarning)


def write(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write a plan to a file, whole or not at all."""
    versions = f"graphrt {__version__}, torch {torch.__version__}"
    head = {"graphrt_plan": FORMAT, "fingerprint": fingerprint(content), "made_with": versions}
    text = json.dumps({**head, **content}, indent=2) + "\n"
    try:
        target = Path(path)
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    except (OSError, TypeError, ValueError) as error:
        raise PlanFileError(
            "the plan cannot be written",
            got=f"{shown(path)} ({error})"[:500],
            expected="a path in a folder that may be written",
            advice='plan.save("plan.json"), or make the folder before',
        ) from error


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], str]:
    """The content that `write` wrote, and what it was made with; raises `PlanFileError` for what
    it did not write."""
    with of_a_plan(path):
        content = json.loads(read_bounded(Path(path), _MOST_BYTES))
        version, written = content.pop("graphrt_plan"), content.pop("fingerprint", None)
        if type(version) is not int or version != FORMAT:
            newer = isinstance(version, int) and version > FORMAT
            expected = f"format {FORMAT}" + (": a newer graphrt wrote it" if newer else "")
            raise _not_a_plan(path, f"format {shown(version)}", expected)
        made_with = str(content.pop("made_with"))[:200]
        if written != (counted := fingerprint(content)):
            expected = f"{counted}, of what the file holds"
            raise _not_a_plan(path, f"fingerprint {shown(written)}", expected)
        return {**content, "printed": list(map(str, content["printed"]))}, made_with


@contextlib.contextmanager
def of_a_plan(path: str | os.PathLike[str]) -> Iterator[None]:
    """What is done with a file and its content: raises `PlanFileError` where it is none of a plan,
    though it may be JSON and its fingerprint fit."""
    try:
        yield
    except PlanFileError:
        raise
    except Exception as error:
        # What somebody wrote by hand may fail anywhere in a plan.
        got = f"{type(error).__name__}: {error}"
        raise _not_a_plan(path, got[:500], "what Plan.save wrote") from error


def _not_a_plan(path: str | os.PathLike[str], got: object, expected: str) -> PlanFileError:
    named = str(path) if isinstance(path, (str, os.PathLike)) else shown(path)
    return PlanFileError(
        f"{named[:200]} is no plan that can be used",
        got=got,
        expected=expected,
        advice="save it again: graphrt plan --save PATH, or Plan(...).save(path)",
    )
