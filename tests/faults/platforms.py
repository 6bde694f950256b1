"""Platforms to inject faults into, each instance for one fault."""

from __future__ import annotations

from collections.abc import Callable

from graphrt import Platform, get_platform


def maker_of(name: str) -> Callable[[], Platform]:
    """What makes further instances of an installed platform; raises the named errors."""
    kind = type(get_platform(name))
    return kind
