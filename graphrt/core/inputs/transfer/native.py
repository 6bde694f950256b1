"""The door to native/slots.c, which writes a step's slot in one call where it was built."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

Write = Callable[[Mapping[str, Any], Callable[[], None], bool], bool]


def _built() -> Any:
    try:
        return import_module(f"{__package__}._native")
    except ModuleNotFoundError:
        return None


_native = _built()
NativeWriter: Callable[..., Write] | None = None if _native is None else _native.Writer
MOST_INPUTS = 0 if _native is None else _native.MOST_INPUTS


def packed(rows: Iterable[Sequence[int]]) -> bytes:
    """Numbers as words of 8 bytes."""
    words = array("Q")
    for row in rows:
        words.extend(row)
    return words.tobytes()
