"""`GraphOptions`: what a host or a user sets, from code, a dict, JSON or dotted settings."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from graphrt.core.errors import InvalidOptionError
from graphrt.core.modes import GraphMode
from graphrt.core.sizes import check_sizes

Check = Callable[[str, object], object]

_MIB = 1 << 20
_OPERATOR = re.compile(r"\w+::\w+(\.\w+)?")


@dataclass(frozen=True)
class CompileOptions:
    """Settings of the `torch.compile` integration.

    `compile_sizes` are token counts that get code of their own; "capture_sizes" stands for all
    capture sizes.
    """

    backend: str = "eager"
    compile_sizes: tuple[int | str, ...] = ()
    dynamic_shapes: Literal["backed", "unbacked", "backed_size_oblivious"] = "backed"
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        _check_fields(self, _COMPILE_CHECKS, prefix="compile.")


@dataclass(frozen=True)
class GraphOptions:
    """Everything about graphs that is a setting and not part of the model.

    `breaks` are the operators at which breakable capture breaks, and which may not be captured;
    `splitting_ops` those at which a traced graph is split. `max_size` is the largest size to
    capture. `warm_up_each=False` warms up only the largest graph of each kind, and another one only
    if its capture fails without. `max_padding` is the ratio of padding that dispatch still accepts.
    `share_executables` trades a switch between graphs of equal structure for the memory of an
    executable each. `eager_after_failed_update` repeats a step whose update of tasks raised.

    Values are checked when the options are made; raises `InvalidOptionError`, `InvalidModeError`,
    `InvalidSizesError`.
    """

    mode: GraphMode | None = None
    sizes: tuple[int, ...] | None = None
    max_size: int | None = None
    warmups: int = 1
    warm_up_each: bool = True
    breaks: tuple[str, ...] = ()
    splitting_ops: tuple[str, ...] = ()
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
        _check_fields(self, _GRAPH_CHECKS)

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
            raise _wrong_type("options", changes, "a dict of options", "{'mode': 'FULL'}")
        _check_keys(changes, GraphOptions)
        changed = dict(changes)
        nested = changed.get("compile")
        if isinstance(nested, Mapping):
            _check_keys(nested, CompileOptions, prefix="compile.")
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


# Checks: each returns the value in its field's own type, or raises ------------------------------


def _check_keys(given: Mapping[str, object], owner: type, prefix: str = "") -> None:
    known = [prefix + each.name for each in fields(owner)]
    for key in given:
        name = f"{prefix}{key}"
        if name not in known:
            raise InvalidOptionError(
                f"unknown option {name!r}",
                got=f"{name}={given[key]!r}",
                expected=", ".join(known),
                advice=_nearest(name, known) or "see `GraphOptions` for what each option does",
            )


def _check_fields(options: Any, checks: Mapping[str, Check], prefix: str = "") -> None:
    for name, check in checks.items():
        # The only way to set a field of a frozen dataclass.
        object.__setattr__(options, name, check(prefix + name, getattr(options, name)))


def _nearest(name: str, known: Sequence[str]) -> str | None:
    # Users leave out the prefix or the case as often as they mistype.
    plain = {each.rpartition(".")[2].lower(): each for each in known}
    match = difflib.get_close_matches(name.rpartition(".")[2].lower(), plain, n=1)
    return plain[match[0]] if match else None


def _wrong_type(key: str, value: object, expected: str, example: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"option {key!r} has a wrong value", got=repr(value), expected=expected, advice=example
    )


def _flag(key: str, value: object) -> object:
    if not isinstance(value, bool):
        raise _wrong_type(key, value, "true or false", f"{key}=true")
    return value


def _text(key: str, value: object) -> object:
    if not isinstance(value, str) or not value:
        raise _wrong_type(key, value, "a string", f"quote it: {key}={json.dumps(str(value))}")
    return value


def _whole(least: int, example: int) -> Check:
    def check(key: str, value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise _wrong_type(key, value, f"an integer >= {least}", f"{key}={example}")
        return value

    return check


def _ratio(key: str, value: object) -> object:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:  # type: ignore[arg-type,operator]
        raise _wrong_type(key, value, "a number >= 0", f"{key}=0.5")
    return float(value)  # type: ignore[arg-type]


def _choice(*choices: str) -> Check:
    def check(key: str, value: object) -> object:
        if value not in choices or not isinstance(value, str):
            best = difflib.get_close_matches(str(value).lower(), choices, n=1, cutoff=0.4)
            raise _wrong_type(key, value, " or ".join(choices), f"{key}={(best or choices)[0]}")
        return value

    return check


def _optional(check: Check) -> Check:
    return lambda key, value: None if value is None else check(key, value)


def _mode(key: str, value: object) -> object:
    if not isinstance(value, (str, GraphMode)):
        raise _wrong_type(key, value, ", ".join(GraphMode.__members__), f"{key}=FULL")
    return GraphMode.parse(value)


def _sequence(key: str, value: object, expected: str, example: str) -> tuple[object, ...]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise _wrong_type(key, value, expected, example)
    return tuple(value)


def _sizes(key: str, value: object) -> object:
    expected, example = "ascending positive integers", f"{key}=[1,2,4]"
    sizes = _sequence(key, value, expected, example)
    if any(isinstance(size, bool) or not isinstance(size, int) for size in sizes):
        raise _wrong_type(key, value, expected, example)
    return check_sizes(sizes)  # type: ignore[arg-type]


def _operators(key: str, value: object) -> object:
    expected, example = "operator names: ns::op or ns::op.overload", f'{key}=["aten::mm"]'
    names = _sequence(key, [value] if isinstance(value, str) else value, expected, example)
    for name in names:
        if not isinstance(name, str) or not _OPERATOR.fullmatch(name):
            raise _wrong_type(key, name, expected, example)
    return names


def _compile_sizes(key: str, value: object) -> object:
    expected, example = 'positive integers or "capture_sizes"', f'{key}=[1,8,"capture_sizes"]'
    sizes = _sequence(key, value, expected, example)
    for size in sizes:
        positive = isinstance(size, int) and not isinstance(size, bool) and size > 0
        if not positive and size != "capture_sizes":
            raise _wrong_type(key, size, expected, example)
    return sizes


def _compile(key: str, value: object) -> object:
    if isinstance(value, Mapping):
        _check_keys(value, CompileOptions, prefix=f"{key}.")
        return CompileOptions(**value)
    if not isinstance(value, CompileOptions):
        expected = "CompileOptions or a dict of them"
        raise _wrong_type(key, value, expected, f'{key}={{"backend": "inductor"}}')
    return value


_COMPILE_CHECKS: dict[str, Check] = {
    "backend": _text,
    "compile_sizes": _compile_sizes,
    "dynamic_shapes": _choice("backed", "unbacked", "backed_size_oblivious"),
    "cache_dir": _optional(_text),
}

_GRAPH_CHECKS: dict[str, Check] = {
    "mode": _optional(_mode),
    "sizes": _optional(_sizes),
    "max_size": _optional(_whole(1, 512)),
    "warmups": _whole(0, 1),
    "warm_up_each": _flag,
    "breaks": _operators,
    "splitting_ops": _operators,
    "outputs": _choice("pool", "static", "clone"),
    "lazy": _flag,
    "strict": _flag,
    "launch": _choice("graph", "eager"),
    "check_addresses": _flag,
    "share_executables": _flag,
    "eager_after_failed_update": _flag,
    "state_limit_bytes": _whole(0, 64 * _MIB),
    "max_padding": _optional(_ratio),
    "compile": _compile,
}
