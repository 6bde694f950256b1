"""`GraphOptions`: what a host or a user sets, from code, a dict, JSON or dotted settings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from graphrt.compile.options import CompileOptions
from graphrt.core.base.checks import (
    Check,
    check_fields,
    check_keys,
    choice,
    flag,
    operators,
    optional,
    ratio,
    sequence,
    whole,
    wrong_type,
)
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.batch.modes import GraphMode
from graphrt.core.plan.sizes import check_sizes

_MIB = 1 << 20


@dataclass(frozen=True)
class GraphOptions:
    """Everything about graphs that is a setting and not part of the model.

    `breaks` are the operators at which breakable capture breaks, and which may not be captured.
    `max_size` is the largest size to capture. `warm_up_each=False` warms up only the largest graph
    of each kind, and another one only if its capture fails without. `max_padding` is the ratio of
    padding that dispatch still accepts. `share_executables` trades a switch between graphs of equal
    structure for the memory of an executable each. `eager_after_failed_update` repeats a step whose
    update of tasks raised.

    Values are checked when the options are made; raises `InvalidOptionError`, `InvalidModeError`,
    `InvalidSizesError`.
    """

    mode: GraphMode | None = None
    sizes: tuple[int, ...] | None = None
    max_size: int | None = None
    warmups: int = 1
    warm_up_each: bool = True
    breaks: tuple[str, ...] = ()
    outputs: Literal["pool", "static", "clone"] = "pool"
    lazy: bool = False
    strict: bool = False
    launch: Literal["graph", "eager"] = "graph"
    check_addresses: bool = False
    share_executables: bool = False
    eager_after_failed_update: bool = False
    state_limit_bytes: int = 64 * _MIB
    max_padding: float | None = None
    compile: CompileOptions = field(default_factory=CompileOptions)

    def __post_init__(self) -> None:
        check_fields(self, _GRAPH_CHECKS)

    @classmethod
    def from_dict(cls, options: Mapping[str, object]) -> GraphOptions:
        """Options from names and values; the value of "compile" is a dict of its own."""
        return cls().merged(options)

    @classmethod
    def from_json(cls, text_or_path: str | os.PathLike[str]) -> GraphOptions:
        """Options from a JSON object, or from the file of that path."""
        text = text_or_path
        if not isinstance(text, str) or not text.lstrip().startswith("{"):
            text = _read(Path(text))
        try:
            loaded = json.loads(text, object_pairs_hook=_unrepeated)
        except json.JSONDecodeError as error:
            raise InvalidOptionError(
                "the options are not valid JSON",
                got=f"{error.msg} at line {error.lineno}, column {error.colno}",
                expected="a JSON object",
                advice='{"mode": "FULL", "sizes": [1, 2, 4]}',
            ) from error
        return cls.from_dict(loaded)

    @classmethod
    def from_settings(
        cls, settings: Iterable[str], base: GraphOptions | None = None
    ) -> GraphOptions:
        """Options from "key=value" settings, such as `-c` gives; later ones win.

        Keys of nested options are dotted. A value is JSON if it parses as such, else a string.
        """
        options = cls() if base is None else base
        for setting in settings:
            options = options.merged(_nested(setting))
        return options

    def merged(self, changes: Mapping[str, object]) -> GraphOptions:
        """A copy with these values in place of its own; nested options are merged alike."""
        if not isinstance(changes, Mapping):
            raise wrong_type("options", changes, "a dict of options", "{'mode': 'FULL'}")
        nested_keys = [f"compile.{each.name}" for each in fields(CompileOptions)]
        check_keys(changes, GraphOptions, like=nested_keys)
        changed = dict(changes)
        nested = changed.get("compile")
        if isinstance(nested, Mapping):
            check_keys(nested, CompileOptions, prefix="compile.")
            changed["compile"] = replace(self.compile, **nested)
        return replace(self, **changed)  # type: ignore[arg-type]

    def override(self, **values: object) -> GraphOptions:
        """A copy with those of `values` that are not None: how arguments go before options."""
        return self.merged({key: value for key, value in values.items() if value is not None})

    def to_dict(self) -> dict[str, Any]:
        """Only JSON types; `from_dict` gives equal options back."""
        plain = {each.name: _plain(getattr(self, each.name)) for each in fields(self)}
        plain["compile"] = {
            each.name: _plain(getattr(self.compile, each.name)) for each in fields(self.compile)
        }
        return plain

    def to_json(self, *, indent: int | None = None) -> str:
        """What `from_json` reads."""
        return json.dumps(self.to_dict(), indent=indent)


# Reading -------------------------------------------------------------------------------------


def _nested(setting: str) -> dict[str, object]:
    """{"compile": {"backend": "x"}} from "compile.backend=x"."""
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise InvalidOptionError(
            "a setting needs a key and a value",
            got=repr(setting),
            expected="key=value",
            advice="mode=FULL, sizes=[1,2,4] or compile.backend=inductor",
        )
    value: object = _json_or_text(text.strip())
    first, *rest = key.strip().split(".")
    for part in reversed(rest):
        value = {part: value}
    return {first: value}


def _json_or_text(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_unrepeated)
    except json.JSONDecodeError:
        return text


def _unrepeated(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise InvalidOptionError(
                f"option {key!r} is given twice",
                got=f"{found[key]!r} and {value!r}",
                expected="each option once",
                advice="remove one of them",
            )
        found[key] = value
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidOptionError(
            "the options file cannot be read",
            got=f"{str(path)!r} ({error.strerror})",
            expected="a path, or a JSON object that starts with '{'",
            advice="check the path",
        ) from error


def _plain(value: object) -> object:
    if isinstance(value, GraphMode):
        return value.name
    return list(value) if isinstance(value, tuple) else value


# Checking ------------------------------------------------------------------------------------


def _mode(key: str, value: object) -> object:
    if not isinstance(value, (str, GraphMode)):
        raise wrong_type(key, value, ", ".join(GraphMode.__members__), f"{key}=FULL")
    return GraphMode.parse(value)


def _sizes(key: str, value: object) -> object:
    expected, example = "ascending positive integers", f"{key}=[1,2,4]"
    sizes = sequence(key, value, expected, example)
    if any(isinstance(size, bool) or not isinstance(size, int) for size in sizes):
        raise wrong_type(key, value, expected, example)
    return check_sizes(sizes)  # type: ignore[arg-type]


def _compile(key: str, value: object) -> object:
    if isinstance(value, Mapping):
        check_keys(value, CompileOptions, prefix=f"{key}.")
        return CompileOptions(**value)
    if not isinstance(value, CompileOptions):
        expected = "CompileOptions or a dict of them"
        raise wrong_type(key, value, expected, f'{key}={{"backend": "inductor"}}')
    return value


_GRAPH_CHECKS: dict[str, Check] = {
    "mode": optional(_mode),
    "sizes": optional(_sizes),
    "max_size": optional(whole(1, 512)),
    "warmups": whole(0, 1),
    "warm_up_each": flag,
    "breaks": operators,
    "outputs": choice("pool", "static", "clone"),
    "lazy": flag,
    "strict": flag,
    "launch": choice("graph", "eager"),
    "check_addresses": flag,
    "share_executables": flag,
    "eager_after_failed_update": flag,
    "state_limit_bytes": whole(0, 64 * _MIB),
    "max_padding": optional(ratio),
    "compile": _compile,
}
