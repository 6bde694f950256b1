"""Calls of torch.compile'd functions inside a capture: recorded as one opaque call each."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base._undo import ProcessChange
from graphrt.core.base.errors import IN_PIECES, BakedScalarError, CaptureError, GraphRTError
from graphrt.core.base.option_values import shown
from graphrt.core.base.thread_mode import dispatch_modes
from graphrt.core.base.torch_names import dispatch_keys, dispatch_keys_now
from graphrt.core.capture.refusals import Refusal, user_source
from graphrt.core.replay.recording import current_capture
from graphrt.cpu.private_torch import (
    hook_compiled_calls,
    hook_compiled_code,
    inductor_loaded,
    set_grad_enabled,
)
from graphrt.cpu.tape.lowering import Call, Lowered
from graphrt.cpu.tape.recorder import Step, Tape
from graphrt.cpu.tape.refusals import HostReads

_OTHER_CODE = Refusal(
    CaptureError,
    "compiled code was called other than through torch.compile, and cannot be recorded",
    advice="use torch.compile, wrap it in a custom operator (torch.library.custom_op), or "
    f"{IN_PIECES}",
)
_UNKNOWN_CALL = Refusal(
    CaptureError,
    f"compiled callables of torch {torch.__version__} cannot be recorded",
    advice=f"capture without torch.compile, or {IN_PIECES}",
)
_PROFILED_CALL = Refusal(
    CaptureError,
    f"torch {torch.__version__}: no compiled callable is recorded under a profiler",
    advice="capture without the profiler (sys.setprofile), or use torch 2.12 or later",
)

# How this hooks in: the function that torch.compile returns is `compile_wrapper` of
# torch/_dynamo/eval_frame.py. It calls that module's `_callback_from_stance` right before the
# user's function and its `set_eval_frame(None)` right after, with the result in a local. Both are
# module globals, so while a capture is open they are wrapped: the first pauses the tape, the second
# records the call; its result stays where it is. Before torch 2.12 the result is no local; there
# it is seen as the function returns it. Where a torch version has another shape (checked on the
# code object) the capture is refused: kernels of compiled code are no operators, and a recording
# without them would be wrong.
_NEEDED_LOCALS = frozenset({"args", "kwargs"})
_RESULT_LOCALS = frozenset({"result", "call_succeeded"})
_NEEDED_CELLS = frozenset({"fn", "self"})

# Inductor's code that is called in any other way (compile_fx, standalone_compile, AOTInductor, a
# Dynamo that cannot be hooked) is refused as it runs.
_thread = threading.local()


class CompiledCalls:
    """Watches this thread for compiled calls from `open` to `close`."""

    def __init__(self, tape: Tape, host_reads: HostReads) -> None:
        self.tape = tape
        self.host_reads = host_reads
        self._region: FrameType | None = None

    def open(self) -> None:
        _thread.watch = self
        hooked_calls.enter(self)
        hooked_code.enter(self)
        self._blind = not (hooked_calls or (hooked_code and inductor_loaded()))

    def close(self) -> None:
        _thread.watch = None
        self._region = None
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

    def refuse_code(self) -> None:
        """Raise `CaptureError` if what runs now would be missing in the recording."""
        if self.tape.paused or self.tape not in dispatch_modes():
            return
        raise _OTHER_CODE(op="Inductor")

    def enter(self, frame: FrameType) -> bool:
        if self.tape.paused:
            return False
        refusal = _why_not(frame.f_code)
        if refusal is not None:
            # Raised here it would skip the rest of Dynamo's own clean-up.
            self.tape.failure = refusal
            return False
        self._region = frame
        self._handled = sys.exc_info()[1]
        self._restore = self.host_reads.pause()
        self.tape.paused = True
        return True

    def leave(self, frame: FrameType) -> None:
        if frame is not self._region:
            return
        if _RESULT_LOCALS.issubset(frame.f_code.co_varnames):
            values = frame.f_locals
            self._finish(frame, values.get("result"), values.get("call_succeeded", False))
        elif sys.exc_info()[1] is not self._handled:
            self._finish(frame, None, False)
        else:
            self._finish_at_return(frame)

    def _finish_at_return(self, frame: FrameType) -> None:
        # Stands if someone else's profiler takes the place of this one before the return.
        lost = CaptureError(
            "the result of a compiled callable was not seen",
            op="torch.compile",
            advice=f"capture without a profiler, without torch.compile, or {IN_PIECES}",
        )
        self.tape.failure = lost

        def profile(returning: FrameType, event: str, value: Any) -> None:
            if returning is frame and event == "return":
                sys.setprofile(None)
                self.tape.failure = None
                self._finish(frame, value, True)

        sys.setprofile(profile)

    def _finish(self, frame: FrameType, result: Any, succeeded: bool) -> None:
        self._region = None
        self._restore()
        try:
            if succeeded:
                self._record(frame, frame.f_locals, result)
        except Exception as error:
            # Raised here it would skip the rest of Dynamo's own clean-up.
            self.tape.failure = error
        finally:
            self.tape.paused = False

    def _record(self, frame: FrameType, values: Any, result: Any) -> None:
        tape = self.tape
        args, kwargs = values["args"], values["kwargs"]
        capture = current_capture()
        if capture is not None:
            capture.check_read((args, kwargs), "a compiled function is given")
        call = _Reissue(frame, values, _baked(result))
        tape.births.write(None, (args, kwargs))
        weak_args, weak_kwargs = tape.aliases.weak_in_place((args, kwargs))
        # The forward keeps the tensors it was given, so those become the recorded outputs.
        _, copies, tokens = tape.keep_fresh(result, (args, kwargs))
        lowered = Lowered("opaque", Call(call, (weak_args, weak_kwargs)), copies, checked=True)
        tape.steps.append(Step(None, weak_args, weak_kwargs, lowered, user_source(), tokens))


class _Reissue:
    """Calls the compiled function again as the forward called it."""

    def __init__(self, frame: FrameType, values: Any, baked: list[tuple[str, Any]]) -> None:
        self._baked = baked
        # A function equal to the one that was called, which no frame object leads back to.
        self._fn = FunctionType(
            frame.f_code,
            frame.f_globals,
            closure=tuple(CellType(values[name]) for name in frame.f_code.co_freevars),
        )
        self._include, self._exclude = dispatch_keys_now()
        self._grad = torch.is_grad_enabled()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Compiled code is guarded on this state, and would be compiled anew in any other.
        with dispatch_keys(self._include, self._exclude):
            set_grad_enabled(self._grad)
            try:
                result = self._fn(*args, **kwargs)
            finally:
                set_grad_enabled(False)
        if self._baked:
            _same_values(self._baked, _baked(result))
        return result


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def _baked(result: Any) -> list[tuple[str, Any]]:
    """What is no tensor in the result of a compiled call, which the forward went on with."""
    leaves = []
    for path, leaf in tree.leaves(result):
        if leaf is None or isinstance(leaf, torch.Tensor):
            continue
        if not isinstance(leaf, _PLAIN):
            raise CaptureError(
                "a compiled callable returned a container whose tensors cannot be found",
                op="torch.compile",
                got=f"{type(leaf).__name__}{' at ' + path if path else ''}",
                expected="tensors, numbers and strings in tuples, lists, dicts and dataclasses",
                advice=f"return one of these, or {IN_PIECES}",
            )
        leaves.append((path, leaf))
    return leaves


def _same_values(captured: list[tuple[str, Any]], now: list[tuple[str, Any]]) -> None:
    for (path, before), (_, value) in zip(captured, now, strict=True):
        if type(before) is not type(value) or before != value:
            raise BakedScalarError(
                "a compiled callable returned another value than the graph holds"
                f"{' at ' + path if path else ''}",
                got=shown(value),
                expected=shown(before),
                advice=f"return it as a tensor, or {IN_PIECES}",
            )


def _why_not(code: CodeType) -> GraphRTError | None:
    """Why a compiled call with this code cannot be recorded."""
    if not (
        code.co_name == "compile_wrapper"
        and _NEEDED_LOCALS.issubset(code.co_varnames)
        and _NEEDED_CELLS.issubset(code.co_freevars)
    ):
        return _UNKNOWN_CALL(op="torch.compile")
    if not _RESULT_LOCALS.issubset(code.co_varnames) and sys.getprofile() is not None:
        return _PROFILED_CALL(op="torch.compile")
    return None


def _running() -> None:
    watch: CompiledCalls | None = getattr(_thread, "watch", None)
    if watch is not None:
        watch.refuse_code()


def _entering(original: Callable[[Any], Any]) -> FunctionType:
    def callback_from_stance(callback: Any) -> Any:
        effective = original(callback)
        watch: CompiledCalls | None = getattr(_thread, "watch", None)
        if watch is not None and effective is not None:
            watch.enter(sys._getframe(1))
        return effective

    assert isinstance(callback_from_stance, FunctionType)
    return callback_from_stance


def _leaving(original: Callable[[Any], Any]) -> FunctionType:
    def set_eval_frame(callback: Any) -> Any:
        prior = original(callback)
        watch: CompiledCalls | None = getattr(_thread, "watch", None)
        if watch is not None and callback is None:
            watch.leave(sys._getframe(1))
        return prior

    assert isinstance(set_eval_frame, FunctionType)
    return set_eval_frame


# What is skipped runs while Dynamo watches for frames to compile.
hooked_calls = ProcessChange(
    partial(hook_compiled_calls, _entering, _leaving, [Tape.__torch_dispatch__.__code__])
)
hooked_code = ProcessChange(partial(hook_compiled_code, _running))
