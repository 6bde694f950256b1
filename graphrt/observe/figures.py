"""The form of a saved report: what stands in the fields that its text and its page are made of.

A file may hold anything. Each such field is checked for its kind, so that nothing that reads a
report fails in the middle, and its text is made printable. Further keys are kept: a later version
may have written them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from graphrt.core.base.option_values import MOST, shown
from graphrt.core.base.texts import printable, printable_data

Kind = Callable[[Any, str], Any]
"""Takes a value and the name of its field; returns the value, or raises `UnfitError`."""

_MOST_S = 1e15
"""More seconds, or microseconds, than any run has."""


class UnfitError(ValueError):
    """A field that has another kind of value."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{field or 'it'} is {shown(value)}, not {expected}")


def _line(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise UnfitError(field, value, "text")
    return printable(value, kept="")


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise UnfitError(field, value, "text")
    return printable(value)


def _flag(value: Any, field: str) -> bool:
    if not isinstance(value, bool):
        raise UnfitError(field, value, "true or false")
    return value


def _integer(least: int) -> Kind:
    def kind(value: Any, field: str) -> int:
        if type(value) is not int or not least <= value <= MOST:
            raise UnfitError(field, value, f"an integer of at least {least}")
        return value

    return kind


def _number(value: Any, field: str) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _MOST_S:
        raise UnfitError(field, value, "a number of at least 0")
    return value  # type: ignore[no-any-return]


def _optional(kind: Kind) -> Kind:
    return lambda value, field: None if value is None else kind(value, field)


def _list(kind: Kind) -> Kind:
    def read(value: Any, field: str) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            raise UnfitError(field, value, "a list")
        return [kind(each, f"{field}[{at}]") for at, each in enumerate(value)]

    return read


def _pair(first: Kind, second: Kind) -> Kind:
    def read(value: Any, field: str) -> list[Any]:
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise UnfitError(field, value, "a pair")
        return [first(value[0], field), second(value[1], field)]

    return read


def _by_name(kind: Kind) -> Kind:
    def read(value: Any, field: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise UnfitError(field, value, "an object")
        return {_line(key, field): kind(each, f"{field}.{key}") for key, each in value.items()}

    return read


def _record(kinds: Mapping[str, Kind], new: Mapping[str, Any] = MappingProxyType({})) -> Kind:
    """`new` are fields that earlier versions did not write, each with the value it has then."""

    def read(value: Any, field: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise UnfitError(field, value, "an object")
        value = {**new, **value}
        missing = [key for key in kinds if key not in value]
        if missing:
            raise UnfitError(field, [*value], f"an object with {missing[0]!r}")
        begin = f"{field}." if field else ""
        return {
            printable_data(key): kinds[key](each, f"{begin}{key}")
            if key in kinds
            else printable_data(each)
            for key, each in value.items()
        }

    return read


_count, _bytes = _integer(0), _optional(_integer(-MOST))
_sizes = _list(_pair(_count, _integer(1)))

_GRAPH = {
    "graph": _line, "mode": _line, "tokens": _integer(1), "steps": _count,
    "not_served": _by_name(_count), "sizes": _sizes, "live_tokens": _count,
    "padded_tokens": _count, "capture_s": _number, "warm_up_s": _number, "began_s": _number,
    "pool_bytes": _bytes, "driver_bytes": _bytes, "trial": _line, "deterministic": _flag,
    "failure": _optional(_text), "replay_s": _optional(_number), "eager_s": _optional(_number),
}  # fmt: skip
_UNTIMED = {"replay_s": None, "eager_s": None}
_STEPS = {"reason": _line, "meaning": _line, "steps": _count, "sizes": _sizes}
_READ = {
    "name": _line, "dtype": _line, "shape": _list(_count), "bytes": _count, "written": _flag,
    "moved": _flag,
}  # fmt: skip
_TRUST = {
    "only_graphs_bytes": _count, "dicts_watched": _count, "not_watched": _line,
    "glance_steps": _count, "harmless": _list(_line), "reads": _list(_record(_READ)),
}  # fmt: skip

report = _record({
    "versions": _by_name(_line), "mode": _line, "device": _line, "capture_s": _number,
    "pool_bytes": _bytes, "driver_bytes": _bytes, "live_tokens": _count, "padded_tokens": _count,
    "padding": _number, "staging_waits": _count, "graphs": _list(_record(_GRAPH, _UNTIMED)),
    "dropped": _list(_record({"graph": _line, "reason": _text})),
    "steps": _list(_record(_STEPS)), "trust": _record(_TRUST),
    "platform": _line, "axis": _line, "uncompiled": _list(_line),
}, {"platform": "", "axis": "tokens", "uncompiled": []})  # fmt: skip
"""A report as `RunnerReport.to_dict()` makes it."""


_SAME = re.compile(r"\b(\d+) tokens \1 reqs\b")
_TOKENS = re.compile(r"(?<=\d )tokens\b|(?<=\bmore )tokens\b|(?<=\bcomputed )tokens\b")


def in_its_words(figures: Mapping[str, Any], data: Any) -> Any:
    """Plain data of a report, or a text about it, with "rows" for the tokens of a model that has
    none, each of which is a request. Names of arguments, such as `max_num_tokens=`, stay."""
    if figures.get("axis") != "rows":
        return data
    if isinstance(data, str):
        return _TOKENS.sub("rows", _SAME.sub(r"\1 tokens", data))
    if isinstance(data, Mapping):
        return {key: in_its_words(figures, value) for key, value in data.items()}
    return [in_its_words(figures, each) for each in data] if isinstance(data, list) else data
