"""Counting the device actions of a scenario, and letting one of them fail."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import graphrt

GRAPHRT = str(Path(graphrt.__file__).parent)

OUT_OF_MEMORY = {
    "cpu": lambda: MemoryError("injected: out of memory"),
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. injected"),
    "npu": lambda: RuntimeError("NPU out of memory. injected"),
}
"""What allocators raise, by device type."""


@dataclass(frozen=True)
class Fault:
    """The action number `at` of a kind fails: in its place, or `late`, right after it was done.

    With `second`, the action that comes so many actions later, of whatever kind, is interrupted: 1
    is the first thing that is done to recover.
    """

    kind: str
    at: int
    error: str
    late: bool = False
    second: int = 0

    def __str__(self) -> str:
        first = f"{self.error}{' after' if self.late else ' in place of'} {self.kind} {self.at}"
        return f"{first}, interrupt at action {self.second} after it" if self.second else first


WAYS = (("runtime", False), ("memory", False), ("interrupt", False), ("interrupt", True))
"""Errors, and whether they come late. Only an interrupt can come after something that was done."""


class Faults:
    """Counts actions by kind while it is `on`, and raises at the one that is armed."""

    def __init__(self, device_type: str) -> None:
        self.on = False
        self.seen: Counter[str] = Counter()
        self.where = ""
        self.happened: type[BaseException] | None = None
        self._since = 0
        self._device_type = device_type
        self._fault: Fault | None = None

    @contextmanager
    def armed(self, fault: Fault | None) -> Iterator[None]:
        """Count, and let `fault` happen, inside of the block."""
        self.seen.clear()
        self._fault, self.happened, self.where = fault, None, ""
        self._since = 0
        self.on = True
        try:
            yield
        finally:
            self.on = False

    def hit(self, kind: str) -> Callable[[], None]:
        """Count an action that begins; what this returns is to be called when it is done."""
        if not self.on:
            return _nothing
        place, fault = self.seen[kind], self._fault
        self.seen[kind] += 1
        if self.happened is not None:
            self._since += 1
            if fault is not None and self._since == fault.second:
                self._raise(again=True)
        if fault is None or fault.kind != kind or fault.at != place:
            return _nothing
        if fault.late:
            return self._raise
        self._raise()
        return _nothing

    def strikes(self, kind: str) -> bool:
        """Count an action that reports failure by a status; whether it is to fail."""
        try:
            self.hit(kind)()
        except BaseException as error:
            if not isinstance(error, Exception):
                raise
            return True
        return False

    def around(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as an action; a context manager that it returns is one more when entered, and
        one when left."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            done = self.hit(kind)
            result = function(*args, **kwargs)
            done()
            entered = self.on and function.__name__ in _ENTERED
            return _Entered(self, kind, result) if entered else result

        return call

    def _raise(self, again: bool = False) -> None:
        fault = self._fault
        assert fault is not None
        self.where = _caller(sys._getframe(1))
        error: BaseException
        if fault.error == "interrupt" or again:
            error = KeyboardInterrupt("injected")
        elif fault.error == "memory":
            error = OUT_OF_MEMORY[self._device_type]()
        else:
            error = RuntimeError("injected: the device failed")
        # Not kept: it would keep all that its frames hold.
        self.happened = type(error)
        error.injected_by = self  # type: ignore[union-attr]
        raise error

    def injected(self, error: BaseException) -> bool:
        """Whether this is the error that was raised here."""
        return getattr(error, "injected_by", None) is self


_ENTERED = ("on_stream", "allocate_in")
"""What returns context managers."""


class _Entered(AbstractContextManager[Any]):
    def __init__(self, faults: Faults, kind: str, inner: AbstractContextManager[Any]) -> None:
        self._faults, self._kind, self._inner = faults, kind, inner

    def __enter__(self) -> Any:
        done = self._faults.hit(self._kind)
        result = self._inner.__enter__()
        done()
        return result

    def __exit__(self, *exc_info: Any) -> Any:
        # What leaves is done in any case: there is nothing else that a caller could do.
        result = self._inner.__exit__(*exc_info)
        self._faults.hit(self._kind)()
        return result


def _nothing() -> None:
    pass


def called_by_graphrt(depth: int = 2) -> bool:
    """Whether the caller's caller is graphrt's own code."""
    return sys._getframe(depth).f_code.co_filename.startswith(GRAPHRT)


def _caller(frame: FrameType | None) -> str:
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(GRAPHRT):
            return f"{name[len(GRAPHRT) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
