"""Public names say where hosts import them from, as tracebacks, `help` and reprs show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Named = TypeVar("Named", bound=Callable[..., object])


def public(home: str) -> Callable[[Named], Named]:
    """Let a class or a function name the module of the surface that hosts import it from."""

    def move(defined: Named) -> Named:
        defined.__module__ = home
        return defined

    return move
