"""Taking a mode off torch's stacks wherever it is, without disturbing the others."""

from __future__ import annotations

from collections.abc import Callable

from torch import _C
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack


def dispatch_modes() -> list[TorchDispatchMode]:
    """The dispatch modes of this thread, innermost last."""
    return list(_get_current_dispatch_mode_stack())


def remove_dispatch_mode(mode: TorchDispatchMode) -> None:
    """Leave `mode`; modes that were entered after it stay as they are."""
    stack = dispatch_modes()
    if mode not in stack:
        return
    above = stack[stack.index(mode) + 1 :]
    # The base class's enter and exit: those of the modes themselves may do more than push and pop.
    for other in reversed(above):
        TorchDispatchMode.__exit__(other, None, None, None)  # type: ignore[no-untyped-call]
    TorchDispatchMode.__exit__(mode, None, None, None)  # type: ignore[no-untyped-call]
    for other in above:
        TorchDispatchMode.__enter__(other)  # type: ignore[no-untyped-call]


def lift_function_mode(mode: TorchFunctionMode) -> Callable[[], None]:
    """Take `mode` off the function mode stack; returns what puts it back where it was."""
    above = _pop_down_to(mode)
    if above is None:
        return lambda: None
    for other in above:
        _C._push_on_torch_function_stack(other)

    def put_back() -> None:
        popped = [_C._pop_torch_function_stack() for _ in above]
        _C._push_on_torch_function_stack(mode)
        for other in reversed(popped):
            _C._push_on_torch_function_stack(other)

    return put_back


def _pop_down_to(mode: TorchFunctionMode) -> list[TorchFunctionMode] | None:
    depth = _C._len_torch_function_stack()
    stack = [_C._get_function_stack_at(i) for i in range(depth)]
    if mode not in stack:
        return None
    above = stack[stack.index(mode) + 1 :]
    for _ in range(len(above) + 1):
        _C._pop_torch_function_stack()
    return above
