"""Dispatch modes that touch nothing but the stack of their thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from graphrt.core.base.torch_names import (
    TorchDispatchMode,
    count_dispatch_modes,
    dispatch_mode_stack,
    pop_dispatch_mode,
    push_dispatch_mode,
    without_dispatch_modes,
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
        push_dispatch_mode(self)
        return self

    def __exit__(self, *exc: object) -> None:
        pop_dispatch_mode()


def unseen() -> AbstractContextManager[object]:
    """Keeps what is done in it from every dispatch mode, autograd and inference mode.

    Mostly none of them is on, and to find that out is far cheaper than to leave them.
    """
    if (
        count_dispatch_modes() == 0
        and not torch.is_inference_mode_enabled()
        and not torch.is_grad_enabled()
    ):
        return _NOTHING
    return _unseen()


@contextmanager
def _unseen() -> Iterator[None]:
    with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
        yield


_NOTHING = nullcontext()


def dispatch_modes() -> list[TorchDispatchMode]:
    """The dispatch modes of this thread, innermost last."""
    return list(dispatch_mode_stack())


def remove_dispatch_mode(mode: ThreadMode) -> None:
    """Leave `mode`; modes that were entered after it stay as they are."""
    stack = dispatch_mode_stack()
    if mode not in stack:
        return
    above = stack[stack.index(mode) + 1 :]
    for _ in range(len(above) + 1):
        pop_dispatch_mode()
    for other in above:
        push_dispatch_mode(other)
