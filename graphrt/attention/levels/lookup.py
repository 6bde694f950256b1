"""The level that a known attention backend supports, from its name and a few facts."""

from __future__ import annotations

import difflib
from functools import cache

from graphrt.attention.levels.facts import FACTS, Fact, KnownBackend, Level
from graphrt.attention.levels.known import FAMILIES
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.option_values import check_kind, shown
from graphrt.core.batch.modes import AttentionSupport


def get_cudagraph_support(name: str, **facts: bool | int) -> AttentionSupport:
    """The support that the backend `name` declares under `facts`.

    Engines that keep metadata at fixed addresses declare it. `name` may be an alias, in
    any case, with `_` for `-`. A fact that is not given has its default, and one that the backend
    does not depend on changes nothing. Raises `InvalidOptionError` for an unknown name or fact, or
    a value of the wrong type.
    """
    return level_of(name, **facts).support


def level_of(name: str, **facts: bool | int) -> Level:
    """Like `get_cudagraph_support`, with the conditions and the reason of the level."""
    backend = known_backend(name)
    complete = {fact.name: fact.default for fact in FACTS}
    for fact, value in facts.items():
        _check_fact(fact, value)
        complete[fact] = value
    return next(
        level
        for level in backend.levels
        if all(condition.holds(complete) for condition in level.when)
    )


def known_backends() -> tuple[KnownBackend, ...]:
    """Every backend that has a known level, family by family."""
    return tuple(backend for family in FAMILIES.values() for backend in family)


def known_backend(name: str) -> KnownBackend:
    """The backend of a name or alias; raises `InvalidOptionError` if there is none."""
    check_kind("name", name, str, optional=False, example='"flashinfer"')
    by_name = _by_name()
    normalised = _normalised(name)
    if normalised in by_name:
        return by_name[normalised]
    matches = [each for each in by_name if normalised and each.startswith(normalised)]
    matches = matches or difflib.get_close_matches(normalised, by_name, n=3)
    close = list(dict.fromkeys(by_name[match].name for match in matches))[:3]
    raise InvalidOptionError(
        "unknown attention backend",
        got=shown(name),
        expected=" or ".join(close) or "a name that `graphrt attention` lists",
        advice=f"{(close or ['flashinfer'])[0]}, or declare the level of a backend of your own",
    )


def facts_of(backend: KnownBackend) -> tuple[Fact, ...]:
    """The facts that a backend's level depends on."""
    check_kind(
        "backend", backend, KnownBackend, optional=False, example='known_backend("flashinfer")'
    )
    used = {condition.fact for level in backend.levels for condition in level.when}
    return tuple(fact for fact in FACTS if fact.name in used)


def _check_fact(name: str, value: object) -> None:
    facts = {fact.name: fact for fact in FACTS}
    if name not in facts:
        close = difflib.get_close_matches(name, facts, n=1) or ["decode_context_parallel"]
        raise InvalidOptionError(
            "unknown fact about an attention backend",
            got=shown(name),
            expected=", ".join(facts),
            advice=f"{close[0]}={facts[close[0]].default}",
        )
    default = facts[name].default
    if type(value) is type(default) and (isinstance(value, bool) or value >= 1):
        return
    raise InvalidOptionError(
        f"fact {name!r} has a wrong value",
        got=shown(value),
        expected="True or False" if isinstance(default, bool) else "a number from 1",
        advice=f"{name}={default}",
    )


@cache
def _by_name() -> dict[str, KnownBackend]:
    return {
        _normalised(name): backend
        for backend in known_backends()
        for name in (backend.name, *backend.aliases)
    }


def _normalised(name: str) -> str:
    return name.strip().lower().replace("_", "-")
