"""Compiled code inside a capture is refused: its kernels are no operators, and a recording without
them would be wrong.

Dynamo asks `_callback_from_stance` of torch/_dynamo/eval_frame.py before each function that
`torch.compile` has made, and runs it as it was written where that gives None. It does while a
capture is open, and the next operator raises. Inductor's code that is called in any other way
(compile_fx, standalone_compile, AOTInductor, a Dynamo that cannot be hooked) is refused as it runs.
What graphrt compiles is one operator (`graphrt/compile/backend/as_operator.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from graphrt.core.base._undo import ProcessChange
from graphrt.core.base.errors import IN_PIECES, CaptureError
from graphrt.core.base.torch_names import dispatch_modes
from graphrt.core.capture.refusals import Refusal, user_source
from graphrt.cpu.private_torch import hook_compiled_calls, hook_compiled_code, inductor_loaded
from graphrt.cpu.tape.recorder import Tape

_COMPILED = Refusal(
    CaptureError,
    "compiled code is called inside of the capture: the CPU records operators, which it has not",
    advice="compile with graphrt.compile, wrap it in a custom operator (torch.library.custom_op), "
    f"capture without torch.compile, or {IN_PIECES}",
)

_thread = threading.local()


class CompiledCalls:
    """Watches this thread for compiled calls from `open` to `close`."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def open(self) -> None:
        _thread.tape = self._tape
        hooked_calls.enter(self)
        hooked_code.enter(self)
        self._blind = not (hooked_calls or (hooked_code and inductor_loaded()))

    def close(self) -> None:
        _thread.tape = None
        hooked_calls.leave(self)
        hooked_code.leave(self)

    def check(self) -> None:
        """Raise `CaptureError` if compiled code may have run unseen."""
        if self._blind and inductor_loaded():
            raise CaptureError(
                "torch.compile was loaded inside of the capture, which could not see its calls",
                op="torch.compile",
                advice="call what is compiled once before the capture (a warm-up does)",
            )


def _recording() -> Tape | None:
    """The tape that misses what runs now, if it is no operators."""
    tape: Tape | None = getattr(_thread, "tape", None)
    return tape if tape is not None and tape in dispatch_modes() else None


def _running() -> None:
    if _recording() is not None:
        raise _COMPILED(op="Inductor", source=user_source())


def _entering(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def callback_from_stance(callback: Any) -> Any:
        effective, tape = original(callback), _recording()
        if tape is None or effective is None:
            return effective
        # Raised here it would skip the rest of Dynamo's own clean-up.
        tape.failure = _COMPILED(op="torch.compile", source=user_source())
        return None

    return callback_from_stance


hooked_calls = ProcessChange(partial(hook_compiled_calls, _entering))
hooked_code = ProcessChange(partial(hook_compiled_code, _running))
