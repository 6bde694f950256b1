"""Which operators a forward issues while it is captured: some take another way then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from graphrt.core.base.thread_mode import ThreadMode, is_taken_apart
from graphrt.core.replay.recording import current_capture, issued

T = TypeVar("T")


class IssuedWatch(ThreadMode):
    """Notes the operators of a step that captures, in their order: here those that run eagerly,
    between graphs. What graphs record is noted by their captures, which find the list in `issued`:
    a platform's own operators, which run below, are none of the forward's."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Any] = []

    def run(self, function: Callable[[], T]) -> T:
        """Call `function`, which captures."""
        outer = issued.get()
        try:
            issued.set(self.operators)
            return self.around(function)
        finally:
            issued.set(outer)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if current_capture() is not None:
            return func(*args, **kwargs)
        if is_taken_apart(func):
            return self.take_apart(func, args, kwargs)
        self.operators.append(func)
        return func(*args, **kwargs)
