"""Reading settings that people write: JSON objects, files of them, and key=value."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from graphrt.core.base.errors import InvalidOptionError


def read_json(text_or_path: str | os.PathLike[str]) -> Any:
    """What a JSON object, or the file of that path, says; raises `InvalidOptionError`."""
    text = text_or_path
    if not isinstance(text, str) or not text.lstrip().startswith("{"):
        text = _read(Path(text))
    try:
        return json.loads(text, object_pairs_hook=_unrepeated)
    except json.JSONDecodeError as error:
        raise InvalidOptionError(
            "the options are not valid JSON",
            got=f"{error.msg} at line {error.lineno}, column {error.colno}",
            expected="a JSON object",
            advice='{"outputs": "clone", "warmups": 0}',
        ) from error


def read_settings(settings: Iterable[str]) -> dict[str, object]:
    """Names and values of "key=value" settings, such as `-c` gives; later ones win.

    A value is JSON if it parses as such, else a string. Raises `InvalidOptionError`.
    """
    found: dict[str, object] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise InvalidOptionError(
                "a setting needs a key and a value",
                got=repr(setting),
                expected="key=value",
                advice="mode=FULL, sizes=[1,2,4] or outputs=clone",
            )
        found[key.strip()] = _json_or_text(text.strip())
    return found


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
