"""Dispatch modes that touch nothing but the stack of their thread."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)


class ThreadMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that is nothing but an entry on the stack of its thread.

    Entering a mode the ordinary way also sets flags of the whole process, which two threads that
    capture, or update tasks, at once would leave set.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Lets Dynamo compile with the mode on the stack; a tape records the call as a whole.
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import all of Dynamo at the first operator

    def __enter__(self) -> Any:
        _push_mode(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _pop_mode()


def dispatch_modes() -> list[TorchDispatchMode]:
    """The dispatch modes of this thread, innermost last."""
    return list(_get_current_dispatch_mode_stack())


def remove_dispatch_mode(mode: ThreadMode) -> None:
    """Leave `mode`; modes that were entered after it stay as they are."""
    stack = dispatch_modes()
    if mode not in stack:
        return
    above = stack[stack.index(mode) + 1 :]
    for _ in range(len(above) + 1):
        _pop_mode()
    for other in above:
        _push_mode(other)
