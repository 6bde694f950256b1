"""Bytes, seconds and tables, as people read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
