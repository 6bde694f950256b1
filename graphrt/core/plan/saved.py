"""Plans as JSON: what is kept of one, and what has changed when it is read again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from graphrt.core.base import (
    InvalidOptionError,
    PlanChangedWarning,
    PlanFileError,
    read_bounded,
    shown,
)
from graphrt.core.batch import AttentionSupport, BatchDescriptor, GraphMode, PieceProvider
from graphrt.core.plan.budget import RESOURCES, Budget, Fitted, GraphCost
from graphrt.core.plan.compiled import CompiledFacts, SavedFacts
from graphrt.core.plan.sizes import CaptureKey, CaptureSizes

_MOST_BYTES = 1 << 26
"""Of a file, which is more than the largest plan takes."""

_DEEPEST = 32
"""Lists in lists: a plan takes 4 but for its variants, which may be tuples of tuples. Fixed, as
what Python recurses through depends on the caller's depth and on its recursion limit."""

FORMAT = 1
"""The version of the file; another one is refused."""

_COMPARED = ("mode", "steps", "sizes", "graphs", "left_out")


def plain_results(fitted: Fitted, sizes: CaptureSizes) -> dict[str, Any]:
    """What was resolved, in JSON's types."""
    resolution = fitted.resolution
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
        "total": asdict(fitted.total),
        "graphs": [
            {**_plain_key(each.mode, each.descriptor), **asdict(each.cost)}
            for each in fitted.captured
        ],
        "left_out": [
            {
                **_plain_key(each.mode, each.descriptor),
                **asdict(each.cost),
                "why": each.why,
                "padded_to": each.padded_to,
            }
            for each in fitted.left_out
        ],
    }


def plain_arguments(arguments: Mapping[str, Any], fitted: Fitted) -> dict[str, Any]:
    """What a plan was made from, in JSON's types; compiled modules as their facts."""
    mode, pieces = arguments["mode"], PieceProvider.parse(_unless_auto(arguments["pieces"]))
    attention, budget = arguments["attention"], arguments["budget"]
    named = isinstance(attention, Mapping)
    return {
        "mode": None if mode is None else GraphMode.parse(mode).name,
        "sizes": _listed(arguments["sizes"]),
        "max_size": arguments["max_size"],
        "max_num_tokens": arguments["max_num_tokens"],
        "max_num_reqs": arguments["max_num_reqs"],
        "query_lens": list(arguments["query_lens"]),
        "attention": {name: AttentionSupport.parse(level).name for name, level in attention.items()}
        if named
        else AttentionSupport.parse(attention).name,
        "pieces": arguments["pieces"] if pieces is None else pieces.value,
        "compiled": [_plain_facts(module) for module in arguments["compiled"]],
        "loras": list(arguments["loras"]),
        "bounds": [list(bound) for bound in arguments["bounds"]],
        "variants": [_plain_variant(variant) for variant in arguments["variants"]],
        "budget": None if budget is None else _plain_budget(budget, fitted),
        "traffic": None
        if arguments["traffic"] is None
        else {str(size): share for size, share in arguments["traffic"].items()},
    }


def given_arguments(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Plan` from those of `plain_arguments`."""
    attention, traffic = plain["attention"], plain["traffic"]
    return {
        **plain,
        "attention": {name: AttentionSupport[level] for name, level in attention.items()}
        if isinstance(attention, Mapping)
        else AttentionSupport[attention],
        "compiled": [_given_facts(each) for each in plain["compiled"]],
        "bounds": [tuple(bound) for bound in plain["bounds"]],
        "variants": [_given_variant(variant) for variant in plain["variants"]],
        "budget": None if plain["budget"] is None else _given_budget(plain["budget"]),
        "traffic": None
        if traffic is None
        else {int(size): share for size, share in traffic.items()},
    }


def fingerprint(plain: Mapping[str, Any]) -> str:
    """16 hexadecimal digits over a plan in JSON's types."""
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In what two plans' results differ, a line each."""
    found = []
    for name in _COMPARED:
        old, new = before[name], now[name]
        if old == new:
            continue
        if name in ("graphs", "left_out"):
            old_keys, new_keys = dict.fromkeys(_names(old)), dict.fromkeys(_names(new))
            gone = [key for key in old_keys if key not in new_keys]
            more = [key for key in new_keys if key not in old_keys]
            said = [
                f"{sign} {', '.join(keys)}" for sign, keys in (("-", gone), ("+", more)) if keys
            ]
            found.append(f"{name}: {'; '.join(said) or 'other costs'}")
        else:
            found.append(f"{name}: {json.dumps(old)} -> {json.dumps(new)}")
    return found


def write(path: str | os.PathLike[str], plain: Mapping[str, Any]) -> None:
    """Write a plan to a file, whole or not at all."""
    if _is_deeper(plain, _DEEPEST):
        raise PlanFileError(
            "the plan cannot be written",
            got=f"a variant of tuples nested deeper than {_DEEPEST - 4}",
            advice="name the variant with a string",
        )
    content = {"graphrt_plan": FORMAT, "fingerprint": fingerprint(plain), **plain}
    target = _path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        beside.replace(target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise PlanFileError(
            "the plan cannot be written",
            got=f"{str(path)!r} ({error.strerror})",
            expected="a path in a folder that may be written",
            advice='plan.save("plan.json"), or make the folder before',
        ) from error


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `write` wrote; raises `PlanFileError` for what it did not."""
    file = _path(path)
    try:
        content = json.loads(read_bounded(file, _MOST_BYTES))
        if not isinstance(content, dict) or "graphrt_plan" not in content:
            raise _not_a_plan(path, "JSON of something else", f"a plan of format {FORMAT}")
        _check_format(path, content.pop("graphrt_plan"))
        if _is_deeper(content, _DEEPEST):
            raise _not_a_plan(path, f"lists nested deeper than {_DEEPEST}", "what Plan.save wrote")
        told, counted = content.pop("fingerprint", None), fingerprint(content)
    except PlanFileError:
        raise
    except OSError as error:
        raise _not_a_plan(path, error.strerror, "a file that Plan.save wrote") from error
    except (ValueError, RecursionError) as error:
        raise _not_a_plan(path, f"no JSON: {error}", "a file that Plan.save wrote") from error
    if told != counted:
        raise _not_a_plan(path, f"fingerprint {shown(told)}", f"{counted}, of what the file holds")
    return content


def _check_format(path: str | os.PathLike[str], found: object) -> None:
    if found != FORMAT or isinstance(found, bool):
        newer = isinstance(found, int) and found > FORMAT
        expected = f"format {FORMAT}" + (": a newer graphrt wrote it" if newer else "")
        raise _not_a_plan(path, f"format {shown(found)}", expected)


@contextlib.contextmanager
def of_a_plan(path: str | os.PathLike[str]) -> Iterator[None]:
    """What is done with the content of a file: raises `PlanFileError` where it is none of a plan,
    though it is JSON and its fingerprint fits."""
    try:
        yield
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        got = f"{type(error).__name__}: {error}"
        raise _not_a_plan(path, got[:500], "what Plan.save wrote") from error


def warn_changed(path: str | os.PathLike[str], changed: Sequence[str]) -> None:
    """Warn that a plan of a file comes out differently here."""
    lines = "\n  ".join(changed)
    warnings.warn(
        f"the plan of {os.fspath(path)} comes out differently here:\n  {lines}",
        PlanChangedWarning,
        stacklevel=3,
    )


def _not_a_plan(path: str | os.PathLike[str], got: object, expected: str) -> PlanFileError:
    return PlanFileError(
        f"{os.fspath(path)[:200]} is no plan that can be used",
        got=got,
        expected=expected,
        advice="save it again: graphrt plan --save PATH, or Plan(...).save(path)",
    )


def _is_deeper(content: object, most: int) -> bool:
    below: list[object] = [content]
    for _ in range(most):
        inner: list[object] = []
        for node in below:
            if isinstance(node, dict):
                inner.extend(node.values())
            elif isinstance(node, list):
                inner.extend(node)
        below = inner
    return bool(below)


def _path(path: str | os.PathLike[str]) -> Path:
    wrong = not isinstance(path, (str, os.PathLike)) or not Path(path).name
    if wrong or "\0" in str(path):
        raise PlanFileError(
            "a plan is kept in a file",
            got=shown(path),
            expected="its path",
            advice='"plan.json"',
        )
    return Path(path)


# Parts -------------------------------------------------------------------------------------------


def _plain_key(mode: GraphMode, descriptor: BatchDescriptor) -> dict[str, Any]:
    plain = descriptor._asdict()
    plain["bounds"] = list(descriptor.bounds)
    plain["variant"] = _plain_variant(descriptor.variant)
    return {"mode": mode.name, **plain}


def _given_key(plain: Mapping[str, Any]) -> CaptureKey:
    own = {name: plain[name] for name in BatchDescriptor._fields}
    own["bounds"] = tuple(own["bounds"])
    own["variant"] = _given_variant(own["variant"])
    return GraphMode[plain["mode"]], BatchDescriptor(**own)


def _plain_variant(variant: Hashable) -> Any:
    if variant is None or type(variant) in (str, int):
        return variant
    if type(variant) is tuple and None not in variant:
        return [_plain_variant(each) for each in variant]
    raise InvalidOptionError(
        "a plan with this variant cannot be saved",
        got=shown(variant),
        expected="a string, an int, or a tuple of them",
        advice="name the variant with a string",
    )


def _given_variant(plain: Any) -> Hashable:
    return tuple(map(_given_variant, plain)) if isinstance(plain, list) else plain


def _plain_budget(budget: Budget, fitted: Fitted) -> dict[str, Any]:
    costs = [(each.mode, each.descriptor, each.cost) for each in fitted.captured]
    costs += [(each.mode, each.descriptor, each.cost) for each in fitted.left_out]
    return {
        **{name: getattr(budget, name) for name in RESOURCES},
        "min_piecewise": budget.min_piecewise,
        "notes": list(budget.notes),
        "by_mode": None
        if budget.cost is None or callable(budget.cost)
        else {mode.name: asdict(cost) for mode, cost in budget.cost.items()},
        # A function cannot be saved, but what it said can.
        "costs": [{**_plain_key(mode, own), **asdict(cost)} for mode, own, cost in costs],
    }


def _given_budget(plain: Mapping[str, Any]) -> Budget:
    costs = {_given_key(each): _given_cost(each) for each in plain["costs"]}
    by_mode = plain["by_mode"]

    def cost(mode: GraphMode, descriptor: BatchDescriptor) -> GraphCost:
        known = costs.get((mode, descriptor))
        if known is not None:
            return known
        # The function that knew is gone: a graph that it was not asked about takes no less than
        # any of its mode did.
        alike = [each for key, each in costs.items() if key[0] is mode]
        if not alike:
            return GraphCost()
        return GraphCost(*(max(getattr(each, name) for each in alike) for name in RESOURCES))

    return Budget(
        **{name: plain[name] for name in RESOURCES},
        cost=cost
        if by_mode is None
        else {GraphMode[name]: _given_cost(each) for name, each in by_mode.items()},
        min_piecewise=plain["min_piecewise"],
        notes=tuple(plain["notes"]),
    )


def _given_cost(plain: Mapping[str, Any]) -> GraphCost:
    return GraphCost(**{name: plain[name] for name in RESOURCES})


def _plain_facts(part: CompiledFacts) -> dict[str, Any]:
    provides = part.provides
    return {
        "graphs": part.graphs,
        "provides": None if provides is None else provides.value,
        "whole_graph": part.whole_graph,
    }


def _given_facts(plain: Mapping[str, Any]) -> SavedFacts:
    return SavedFacts(plain["graphs"], PieceProvider.parse(plain["provides"]), plain["whole_graph"])


def _unless_auto(pieces: Any) -> Any:
    return None if isinstance(pieces, str) and pieces.lower() == "auto" else pieces


def _listed(values: Iterable[Any] | None) -> list[Any] | None:
    return None if values is None else list(values)


def _names(graphs: Iterable[Mapping[str, Any]]) -> list[str]:
    return [f"{mode.name} [{descriptor}]" for mode, descriptor in map(_given_key, graphs)]
