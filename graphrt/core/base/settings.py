"""Reading settings that people write as key=value, and files of a bounded size."""

from __future__ import annotations

import errno
import json
import stat
from collections.abc import Iterable
from pathlib import Path

from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.option_values import shown


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
                got=shown(setting),
                expected="key=value",
                advice="mode=FULL, sizes=[1,2,4] or outputs=clone",
            )
        try:
            found[key.strip()] = json.loads(text)
        except (ValueError, RecursionError):
            found[key.strip()] = text.strip()
    return found


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
