"""Counting what an eager run issues, from which a platform knows what a graph of it will take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from graphrt.core.base.thread_mode import ThreadMode, is_taken_apart
from graphrt.core.capture.guard import is_listed
from graphrt.core.device.figures import GraphWork
from graphrt.core.replay.recording import counted
from graphrt.core.trust.watching.operators import facts_of

T = TypeVar("T")

_COLLECTIVES = ("c10d", "_c10d_functional")


class WorkCount(ThreadMode):
    """Counts operators by the stream that is current when they are issued; those in `breaks` count
    as breaks too. Kernels outside of torch's operators are not seen, nor a stream that only they
    use."""

    supports_higher_order_operators = True

    def __init__(self, stream_id: Callable[[], int], breaks: frozenset[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = GraphWork()
        self._stream_id = stream_id
        self._breaks = breaks

    def run(self, function: Callable[[], T]) -> T:
        """Call `function`, which issues what is counted."""
        outer = counted.get()
        try:
            counted.set(self.work)
            return self.around(function)
        finally:
            counted.set(outer)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_taken_apart(func):
            return self.take_apart(func, args, kwargs)
        self.work.collectives |= getattr(func, "namespace", "") in _COLLECTIVES
        if is_listed(func, self._breaks):
            self.work.breaks += 1
        if not facts_of(func).is_view:
            stream, operators = self._stream_id(), self.work.operators
            operators[stream] = operators.get(stream, 0) + 1
        return func(*args, **kwargs)
