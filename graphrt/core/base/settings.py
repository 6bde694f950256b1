"""Reading settings that people write: JSON objects, files of them, and key=value."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.option_values import items_of, shown

_MOST_BYTES = 1 << 20
"""Of a file of options."""


def read_json(text_or_path: str | os.PathLike[str]) -> Any:
    """What a JSON object, or the file of that path, says; raises `InvalidOptionError`."""
    text = text_or_path
    try:
        if not isinstance(text, str) or not text.lstrip().startswith("{"):
            text = read_bounded(Path(text), _MOST_BYTES)
    except (OSError, TypeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidOptionError(
            "the options file cannot be read",
            got=f"{shown(text_or_path)} ({why})",
            expected="a path, or a JSON object that starts with '{'",
            advice="check the path",
        ) from error
    try:
        return _parsed(text)
    except json.JSONDecodeError as error:
        raise _no_json(f"{error.msg} at line {error.lineno}, column {error.colno}") from error


def read_settings(settings: Iterable[str]) -> dict[str, object]:
    """Names and values of "key=value" settings, such as `-c` gives; later ones win.

    A value is JSON if it parses as such, else a string. Raises `InvalidOptionError`.
    """
    found: dict[str, object] = {}
    for setting in items_of("settings", settings, '["outputs=clone"]'):
        key, equals, text = (setting if isinstance(setting, str) else "").partition("=")
        if not equals or not key.strip():
            raise InvalidOptionError(
                "a setting needs a key and a value",
                got=shown(setting),
                expected="key=value",
                advice="mode=FULL, sizes=[1,2,4] or outputs=clone",
            )
        try:
            found[key.strip()] = _parsed(text.strip())
        except json.JSONDecodeError:
            found[key.strip()] = text.strip()
    return found


def _parsed(text: str) -> Any:
    """What JSON says; raises `JSONDecodeError` for text that is none, and `InvalidOptionError`."""
    try:
        return json.loads(text, object_pairs_hook=_unrepeated)
    except (json.JSONDecodeError, InvalidOptionError):
        raise
    except (ValueError, RecursionError) as error:
        # Integers of thousands of digits, and brackets in brackets.
        raise _no_json(str(error)) from error


def read_bounded(path: Path, most_bytes: int) -> str:
    """The text of a file of at most so many bytes; raises `OSError` where there is none, or what is
    there is no file (a pipe, a device without an end), and `ValueError` for one that is larger or
    no UTF-8."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "no regular file")
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes} bytes")
    return content.decode("utf-8")


def _no_json(why: str) -> InvalidOptionError:
    return InvalidOptionError(
        "the options are not valid JSON",
        got=why,
        expected="a JSON object",
        advice='{"outputs": "clone", "warmups": 0}',
    )


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
