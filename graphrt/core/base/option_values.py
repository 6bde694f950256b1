"""Checks of option values: each returns the value in its field's own type, or raises."""

from __future__ import annotations

import difflib
import inspect
import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import fields
from typing import Any

import torch

from graphrt.core.base.errors import GraphRTError, InvalidOptionError

Check = Callable[[str, object], object]
"""Takes the option's name and its value; raises `InvalidOptionError`."""

MOST = (1 << 63) - 1
"""The largest number that an option, a plan or a shape can have: that of an int64."""

MOST_ITEMS = 1 << 16
"""The most that a list of sizes, cases or names can have; an endless one has more."""

_SHOWN = 200
"""Characters of a value in a message."""

_EXAMPLES = {str: '"name"', int: "1", Mapping: "{}", torch.Tensor: "torch.zeros(1)"}
"""Right values of a type, for messages."""

_OPERATOR = re.compile(r"\w+::\w+(\.\w+)?")


def check_keys(
    options: Mapping[str, object], owner: type, prefix: str = "", like: Sequence[str] = ()
) -> None:
    """Raise `InvalidOptionError` for a key that is no field of `owner`; the message also names the
    options `like` these."""
    if not isinstance(options, Mapping):
        raise wrong_type("options", options, "a dict of options", "{}")
    names = [*like, *(prefix + each.name for each in fields(owner))]
    for key, value in options.items():
        name = f"{prefix}{key}"
        if name not in names[len(like) :]:
            advice = nearest(name, names) or "see `GraphOptions` for what each option does"
            raise refused(f"unknown option {name!r}", value, ", ".join(names), advice)


def check_fields(options: Any, checks: Mapping[str, Check], prefix: str = "") -> None:
    """Replace each field by what its check makes of it."""
    for name, check in checks.items():
        # The only way to set a field of a frozen dataclass.
        object.__setattr__(options, name, check(prefix + name, getattr(options, name)))


def nearest(name: object, known: Sequence[str]) -> str | None:
    """The known name that was probably meant; None for what is no name."""
    if not isinstance(name, str):
        return None
    # Users leave out the prefix or the case as often as they mistype.
    by_short_name = {each.rpartition(".")[2].lower(): each for each in known}
    match = difflib.get_close_matches(name.rpartition(".")[2].lower(), by_short_name, n=1)
    return by_short_name[match[0]] if match else None


def shown(value: object) -> str:
    """A value for a message, of any size or depth."""
    try:
        return repr(value)[:_SHOWN]
    except Exception:
        # Python refuses to print the longest integers, and what is nested too deeply; an object of
        # the host's may refuse too.
        what = f" of {value.bit_length()} bits" if isinstance(value, int) else " too large to print"
        return f"{type(value).__name__}{what}"


def told(value: object) -> str:
    """A plain value for a report: numbers as they are, all else by its type and length alone, as
    what a host keeps in strings may be a prompt."""
    if value is None or type(value) in (bool, int, float):
        return repr(value)
    count = f" of {len(value)}" if isinstance(value, (str, bytes, tuple, list, dict)) else ""
    return f"{type(value).__name__}{count}"


def wrong_type(key: str, value: object, expected: str, example: str) -> GraphRTError:
    """The error for an option with a wrong value; `example` is a right one."""
    return refused(f"option {key!r} has a wrong value", value, expected, example)


def refused(
    what: str,
    value: object,
    expected: str,
    advice: str,
    error: type[GraphRTError] = InvalidOptionError,
) -> GraphRTError:
    """The error of a value that cannot be used."""
    return error(what, got=shown(value), expected=expected, advice=advice)


def check_kind(
    name: str, value: object, kind: type, *, optional: bool = True, example: str | None = None
) -> None:
    """Raise `InvalidOptionError` for an argument of another type than `kind`, or None unless it is
    `optional`. `example` is a right value for the message, by default `kind()`."""
    if not isinstance(value, kind) and not (optional and value is None):
        expected = kind.__name__ + (" or None" if optional else "")
        right = f"{name}={example or _EXAMPLES.get(kind, f'{kind.__name__}()')}"
        raise refused(f"the argument {name!r} has a wrong type", value, expected, right)


def check_callable(name: str, value: object, advice: str | None = None) -> None:
    """Raise `InvalidOptionError` for an argument that cannot be called."""
    if not callable(value):
        expected = "a function, a module or another callable"
        advice = advice or f"{name}=lambda **inputs: ..."
        raise refused(f"the argument {name!r} cannot be called", value, expected, advice)


def check_takes(name: str, value: object, signature: str, *, optional: bool = False) -> None:
    """Raise `InvalidOptionError` for an argument that cannot be called, or None unless it is
    `optional`. `signature` says how it is called, such as "bind(buffers, descriptor, phase)".
    One that is called with nothing must take nothing."""
    if value is None and optional:
        return
    check_callable(name, value, f"def {signature}: ...")
    if callable(value) and signature.endswith("()"):
        try:
            takes = inspect.signature(value, follow_wrapped=False)
        except (TypeError, ValueError):  # a function in C has none
            return
        try:
            takes.bind()
        except TypeError as error:
            what = f"the argument {name!r} is called without arguments: {error}"
            raise refused(what, value, signature, f"def {signature}: ...") from None


def context_of(
    name: str, make: Callable[[], AbstractContextManager[object]]
) -> AbstractContextManager[object]:
    """The context manager that `make` makes; raises `InvalidOptionError` if it makes none."""
    made: object = make()
    if not isinstance(made, AbstractContextManager):
        advice = f"{name}=contextlib.nullcontext"
        raise refused(f"{name}() makes no context manager", made, "a context manager", advice)
    return made


def check_hashable(
    name: str, value: object, error: type[GraphRTError] = InvalidOptionError
) -> None:
    """Raise `error` for a value that is looked up, and cannot be hashed."""
    try:
        hash(value)
    except Exception as cause:
        expected = "a string, an int, or a tuple of them"
        advice = "a string that names it"
        raise refused(f"{name} must be hashable", value, expected, advice, error) from cause


def flag(key: str, value: object) -> object:
    """A check for True or False."""
    if not isinstance(value, bool):
        raise wrong_type(key, value, "true or false", f"{key}=true")
    return value


def whole(least: int, example: int, most: int = MOST) -> Check:
    """A check for an integer from `least` to `most`; errors advise `example`."""

    def check(key: str, value: object) -> object:
        return count_of(f"option {key!r}", value, least=least, most=most, example=example)

    return check


def count_of(
    name: str,
    value: object,
    *,
    least: int | None = None,
    most: int = MOST,
    error: type[GraphRTError] = InvalidOptionError,
    example: int | None = None,
) -> int:
    """`value` as an int: what counts is an integer, of Python, NumPy, or in a tensor of one.

    Raises `error` for anything else (floats and bools too), for less than `least` and for more than
    `most`, by default what an int64 holds.
    """
    number: int | None = None
    if not isinstance(value, bool) and getattr(value, "dtype", None) is not torch.bool:
        with suppress(TypeError, ValueError, RuntimeError):
            number = operator.index(value)  # type: ignore[arg-type]
    low = -most if least is None else least
    if number is None or not low <= number <= most:
        right = max(low, 1) if example is None else example
        what = f"{name} must be an integer" + ("" if least is None else f" >= {least}")
        advice = f"{name}={right}" if name.isidentifier() else str(right)
        raise refused(what, value, f"an integer from {low} to {most}", advice, error)
    return number


def items_of(
    name: str,
    value: object,
    example: str,
    error: type[GraphRTError] = InvalidOptionError,
    *,
    empty: str = "",
) -> tuple[Any, ...]:
    """The items of a list, a tuple or another iterable, but no string. Raises `error` for anything
    else, for more than `MOST_ITEMS`, and, with the advice `empty`, for none."""
    items: tuple[Any, ...] | None = None
    if not isinstance(value, (str, bytes)):
        with suppress(TypeError):
            items = tuple(itertools.islice(value, MOST_ITEMS + 1))  # type: ignore[call-overload]
    if items is None or len(items) > MOST_ITEMS or (empty and not items):
        what = f"{name} must be a list" + (" that is not empty" if items == () else "")
        expected = f"a list of no more than {MOST_ITEMS} items, such as {example}"
        raise refused(what, value, expected, empty if items == () else f"{name}={example}", error)
    return items


def number_of(
    name: str, value: object, what: str, *, least: int = 0, most: float = math.inf, example: int = 1
) -> float:
    """`value`, which is `what`, as a Python number from `least` to `most`; raises
    `InvalidOptionError` for anything else."""
    number: Any = value
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        number = value.item()
    if isinstance(number, int):
        most = min(most, MOST)
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not is_number or not least <= number <= most:
        expected, advice = f"a number from {least} to {most}", f"{name}={max(least, example)}"
        raise refused(f"{what} must be a number >= {least}", value, expected, advice)
    return number  # type: ignore[no-any-return]


def padding_ratio(key: str, value: object) -> float:
    """A ratio of a graph's tokens to the batch's, which has no more."""
    return float(number_of(key, value, f"option {key!r}", least=1, most=MOST))


def choice(*choices: str) -> Check:
    """A check for one of these strings."""

    def check(key: str, value: object) -> object:
        # In this order: an object may refuse to be compared.
        if not isinstance(value, str) or value not in choices:
            best = nearest(value, choices) or choices[0]
            raise wrong_type(key, value, " or ".join(choices), f"{key}={best}")
        return value

    return check


def nan_choice(key: str, value: object) -> object:
    """Check an option that takes True (find NaN), "inf" (find infinities too) or False."""
    if isinstance(value, bool) or (isinstance(value, str) and value == "inf"):
        return value
    raise wrong_type(key, value, 'True, False or "inf"', f"{key}=True")


def optional(check: Check) -> Check:
    """The same check, which lets None pass."""
    return lambda key, value: None if value is None else check(key, value)


def operators(key: str, value: object) -> object:
    """A check for names of operators, or a single one; returns them as a tuple."""
    example = '["aten::mm"]'
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)
    names = items_of(key, [value] if isinstance(value, str) else value, example)
    for name in names:
        if not isinstance(name, str) or not _OPERATOR.fullmatch(name):
            expected = "operator names: ns::op or ns::op.overload"
            raise wrong_type(key, name, expected, f"{key}={example}")
    return names
