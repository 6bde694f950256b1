"""Methods that run on the device of their object's pool, whichever is current."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from graphrt.core.replay.pool import GraphPool


class HasPool(Protocol):
    """What has graphs in a pool, such as a runner."""

    pool: GraphPool


Self = TypeVar("Self", bound=HasPool)
P = ParamSpec("P")
R = TypeVar("R")


def on_own_device(
    method: Callable[Concatenate[Self, P], R],
) -> Callable[Concatenate[Self, P], R]:
    """`method` with the device of the pool as this thread's current one."""

    @functools.wraps(method)
    def guarded(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.pool.on_device():
            return method(self, *args, **kwargs)

    return guarded
