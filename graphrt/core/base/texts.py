"""Bytes, seconds and tables, as people read them; and foreign text, as a terminal may have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_MOST_TOLD = 8
"""How many names a text lists; of more it tells their number."""


def listed(names: Sequence[object]) -> str:
    """Names in a text, and how many more there are."""
    more = f" and {len(names) - _MOST_TOLD} more" if len(names) > _MOST_TOLD else ""
    return ", ".join(map(str, names[:_MOST_TOLD])) + more


def size_text(size_bytes: int) -> str:
    """12345 as "12.1 KiB"."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def seconds_text(seconds: float) -> str:
    """0.0123 as "12.3 ms"."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def counted(count: int, noun: str) -> str:
    """3 and "step" as "3 steps"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table: the first and the last column to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *figures, remark in rows:
        cells = map(str.rjust, figures, widths[1:])
        yield "  ".join([name.ljust(widths[0]), *cells, remark]).rstrip()


def error_text(error: BaseException) -> str:
    """The message of any error. A user's `__str__` may raise, as where it formats an attribute that
    is not set: that error must not replace the first one."""
    try:
        return str(error)
    except (Exception, SystemExit):
        return "its __str__() raises"


def error_line(error: BaseException) -> str:
    """The class of any error, and its message."""
    return f"{type(error).__name__}: {error_text(error)}"


def printable(text: str, kept: str = "\n\t") -> str:
    """`text` with every character escaped that a terminal obeys or does not show, but for `kept`.

    For text of files and plugins: an escape sequence may clear the screen, rename the window or
    hide the lines before it.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode()
        for each in text
    )


def printable_data(data: Any) -> Any:
    """Plain data, with all of its text `printable`."""
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, Mapping):
        return {printable_data(key): printable_data(value) for key, value in data.items()}
    return [*map(printable_data, data)] if isinstance(data, (list, tuple)) else data
