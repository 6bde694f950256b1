"""A captured forward on the CPU: a tape of operators and the code that issues them again."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base._undo import ProcessChange, Undo
from graphrt.core.base.errors import (
    IN_PIECES,
    CaptureError,
    NestedCaptureError,
    TaskContractError,
)
from graphrt.core.base.thread_mode import remove_dispatch_mode
from graphrt.core.base.torch_names import dispatch_modes
from graphrt.core.capture.refusals import Refusal, user_source
from graphrt.cpu.arena import Arena
from graphrt.cpu.private_torch import (
    compiles_higher_order,
    count_function_modes,
    hook_compiled_calls,
    hook_compiled_code,
    inductor_loaded,
    no_torch_function,
    set_grad_enabled,
)
from graphrt.cpu.tape.aliases import unexpanded
from graphrt.cpu.tape.fusing import Compiler, Fused
from graphrt.cpu.tape.loops import values_before
from graphrt.cpu.tape.lowering import Call, replay_guard
from graphrt.cpu.tape.recorder import Step, Tape, ValuesBefore
from graphrt.cpu.tape.refusals import HostReads
from graphrt.cpu.task import TaskHandle, reissue

_thread = threading.local()
_autocasts = torch.is_autocast_enabled
_grad_enabled = torch.is_grad_enabled


class TapeGraph:
    """Captures the operators that one thread runs, and replays them at the same addresses."""

    compiler: Compiler | None = None
    """Fuses elementwise operators as a capture ends."""

    def __init__(self) -> None:
        self._capture: _OpenCapture | None = None
        self._clear()

    def _clear(self) -> None:
        self._steps: list[Step] = []
        # Calls before the steps, which set constants that the forward writes.
        self._restores: list[Call] = []
        # Blocks of constants, kept in use.
        self._constants: list[object] = []
        # Index of a step of a task -> its call, which updates replace.
        self._task_calls: dict[int, TaskCall] = {}
        # All steps as one function; None before the capture.
        self._run: Callable[[], None] | None = None
        # Whether the capture was under inference mode: replays are too.
        self._inference = False
        # The memory of the outputs, kept alive.
        self._arena: Arena | None = None

    @property
    def kernels(self) -> int:
        """How many operators a replay issues."""
        return len(self._steps) + len(self._restores)

    @property
    def steps_so_far(self) -> int:
        """How many steps the open capture has recorded."""
        return len(self._open_capture().tape.steps)

    @property
    def issued(self) -> list[list[str]]:
        """The operators that a replay issues for each step, as profilers call them."""
        return [
            ["aten::copy_"] * (step.lowered.kind in ("copy_", "constant"))
            or [step.op.name, *["aten::copy_"] * len(step.lowered.copies)]
            for step in self._steps
        ]

    # Capture ----------------------------------------------------------------------------------

    def capture_begin(self, arena: Arena) -> None:
        """Record this thread's operators from here on; their outputs live in `arena`."""
        if getattr(_thread, "graph", None) is not None:
            raise NestedCaptureError(
                "a capture is open on this thread already",
                advice="end it first, or capture on another thread",
            )
        if self._run is not None:
            raise CaptureError("this graph holds a capture", advice="call reset() first")
        self._arena = arena
        self._inference = torch.is_inference_mode_enabled()
        self._guard = replay_guard(inference=self._inference)
        before = None if self.compiler is None else values_before
        self._capture = _OpenCapture(arena, inference=self._inference, values_before=before)
        _thread.graph = self
        self._capture.open()

    def capture_end(self) -> None:
        """Stop recording; afterwards `replay` works."""
        capture = self._open_capture()
        capture.check()
        if capture.task_start is not None:
            raise TaskContractError("the capture ended inside a task", advice="call task_end()")
        capture.close()
        _thread.graph = None
        self._capture = None
        self._steps = capture.tape.finish()
        for task in capture.tasks:
            for i in range(task.start, task.stop):
                self._task_calls[i] = TaskCall(self._steps[i].lowered.call)
        self._restores, self._constants = capture.tape.constants.finish()
        run = assemble(self._steps, self._task_calls, self._restores)
        if self.compiler is not None and self._arena is not None:
            with self._guard(), torch.autocast("cpu", enabled=False):
                fused = self.compiler.fuse(self._steps, self._task_calls, self._arena)
            run = assemble(self._steps, self._task_calls, self._restores, fused, otherwise=run)
        self._run = run

    def capture_abort(self) -> None:
        """Drop an open or failed capture; never raises, and leaves no mode behind."""
        if self._capture is not None:
            self._capture.close()
        self._capture = None
        if getattr(_thread, "graph", None) is self:
            _thread.graph = None
        self._clear()

    def _open_capture(self) -> _OpenCapture:
        if self._capture is None:
            raise CaptureError("no capture is open on this graph", advice="call capture_begin()")
        if getattr(_thread, "graph", None) is not self:
            raise CaptureError(
                "the capture was begun on another thread",
                advice="begin, issue tasks and end a capture on one thread",
            )
        return self._capture

    # Replay -----------------------------------------------------------------------------------

    def replay(self) -> None:
        """Issue every recorded operator again, at the captured addresses."""
        run = self._run
        if run is None:
            raise CaptureError("nothing was captured into this graph", advice="capture first")
        if count_function_modes() or _autocasts("cpu"):
            # A mode or autocast of the caller would change the recorded operators.
            with no_torch_function(), torch.autocast("cpu", enabled=False):
                self._issue(run)
        else:
            self._issue(run)

    def _issue(self, run: Callable[[], None]) -> None:
        # Kernels of composite operators and Python bodies of custom ones look at the grad mode.
        grad = _grad_enabled()
        with self._guard():
            if not grad:
                run()
                return
            try:
                set_grad_enabled(False)
                run()
                set_grad_enabled(True)
            except BaseException:  # `undoing` by hand, as every replay comes through here
                set_grad_enabled(True)
                raise

    def reset(self) -> None:
        """Forget the capture; the addresses it used may be used again."""
        if self._capture is not None:
            self.capture_abort()
        self._clear()

    # Tasks ------------------------------------------------------------------------------------

    def task_begin(self) -> None:
        """Start bracketing the operators of one updatable task."""
        capture = self._open_capture()
        if capture.task_start is not None:
            raise TaskContractError("a task is open already", advice="call task_end() first")
        capture.task_start = len(capture.tape.steps)
        capture.tape.in_task = True

    def task_end(self) -> TaskHandle:
        """Close the bracket."""
        capture = self._open_capture()
        if capture.task_start is None:
            raise TaskContractError("no task is open", advice="call task_begin() first")
        handle = TaskHandle(capture.task_start, len(capture.tape.steps))
        capture.task_start = None
        capture.tape.in_task = False
        capture.tasks.append(handle)
        return handle

    def update_task(self, handle: TaskHandle, issue: Callable[[], object]) -> None:
        """Take the host arguments of `issue` for later replays; executes nothing.

        A violation raises and leaves the stored arguments as they were.
        """
        indices = range(handle.start, handle.stop)
        if self._run is None or any(i not in self._task_calls for i in indices):
            raise TaskContractError(
                "the task belongs to another graph, or to one that was reset",
                advice="update a graph with the handles of its own task_end()",
            )
        steps = self._steps[handle.start : handle.stop]
        arguments = reissue(steps, issue, inference=self._inference)
        for index, step, new in zip(indices, steps, arguments, strict=True):
            step.args, step.kwargs = new.args, new.kwargs
            self._task_calls[index].issue = Call(step.op.raw, new.args, new.kwargs).bound()


class _OpenCapture:
    """The tape of an open capture, its guard of host reads and its hooks of compiled code."""

    def __init__(
        self, arena: Arena, *, inference: bool, values_before: ValuesBefore | None
    ) -> None:
        self.tape = Tape(arena, inference=inference, values_before=values_before)
        self.tasks: list[TaskHandle] = []
        self.task_start: int | None = None
        """The index of the open task's first step; None if no task is open."""
        constants = self.tape.constants
        self._host_reads = HostReads(constants.note_wrapped, constants.are_constant)
        self._compiled = CompiledCalls(self.tape)
        self._undo = Undo()

    def open(self) -> None:
        # Each is undone even if it, or a later one, fails to open.
        self._undo.later(self._host_reads.close)
        self._host_reads.open()
        self._undo.later(partial(remove_dispatch_mode, self.tape))
        self.tape.__enter__()
        self._undo.later(self._compiled.close)
        self._compiled.open()

    def check(self) -> None:
        if self.tape.failure is not None:
            raise self.tape.failure
        self._compiled.check()
        stack = dispatch_modes()
        if stack and stack[-1] is self.tape:
            return
        if self.tape not in stack:
            raise CaptureError(
                "a segment ends where the capture's dispatch mode is off: inside of an operator's "
                "kernel, of which the CPU replays all, or where the forward removed the mode",
                advice="break at the operator, not in its kernel: "
                'GraphOptions(breaks=("ns::operator",))',
            )
        raise CaptureError(
            "the forward left a dispatch mode open at the end of the capture",
            got=", ".join(type(mode).__name__ for mode in stack[stack.index(self.tape) + 1 :]),
            advice="close the mode before the capture, or the segment, ends",
        )

    def close(self) -> None:
        """Close all of it; after an error in between, call it again for the rest."""
        self._undo.now()


# Compiled code inside of a capture --------------------------------------------------------------


_COMPILED = Refusal(
    CaptureError,
    "the forward calls code of torch.compile: the CPU replays operators of torch, and such code "
    "calls none",
    advice="graphrt.compile(model, dynamic_dims=...) in place of torch.compile, the model itself, "
    f"a custom operator around the code (torch.library.custom_op), or {IN_PIECES}",
)


class CompiledCalls:
    """Refuses calls of compiled code on this thread from `open` to `close`: compiled kernels are no
    operators, so the tape would lack them.

    Dynamo calls `_callback_from_stance` (torch/_dynamo/eval_frame.py) before a function of
    `torch.compile`, and runs the original function if it returns None. Hooked, it returns None
    while a capture is open, and the next operator raises. Inductor's code that is called in any
    other way (compile_fx, standalone_compile, AOTInductor, a Dynamo that cannot be hooked) raises
    as it is called. graphrt makes an operator of each piece that it compiles
    (`graphrt/compile/backend/as_operator.py`).
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def open(self) -> None:
        _thread.tape = self._tape
        hooked_calls.enter(self)
        hooked_code.enter(self)
        # Whether compiled code could run unseen. A hook is true while it is in place. The hook of
        # Inductor's code needs Inductor: loaded later, it would not be hooked.
        self._blind = not (hooked_calls or (hooked_code and inductor_loaded()))

    def close(self) -> None:
        _thread.tape = None
        hooked_calls.leave(self)
        hooked_code.leave(self)

    def check(self) -> None:
        """Raise `CaptureError` if compiled code may have run unseen: no hook was in place, and
        Inductor is loaded now."""
        if self._blind and inductor_loaded():
            raise CaptureError(
                "torch.compile was first loaded inside of the capture, so its calls were not seen",
                op="torch.compile",
                advice="graphrt.compile(model, dynamic_dims=...) in its place, or the model itself",
            )


def _recording_tape() -> Tape | None:
    """The tape of this thread, if it records now: compiled code would be missing from it."""
    tape: Tape | None = getattr(_thread, "tape", None)
    return tape if tape is not None and tape in dispatch_modes() else None


def _refuse_inductor_code() -> None:
    if _recording_tape() is not None:
        raise _COMPILED(op="Inductor", source=user_source())


def _with_refusal(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def callback_from_stance(callback: Any) -> Any:
        effective, tape = original(callback), _recording_tape()
        # Of what torch compiles for a higher-order operator, the tape gets that operator.
        if tape is None or effective is None or compiles_higher_order(sys._getframe(1)):
            return effective
        # Raised here it would skip the rest of Dynamo's own clean-up.
        tape.failure = _COMPILED(op="torch.compile", source=user_source())
        return None

    return callback_from_stance


hooked_calls = ProcessChange(partial(hook_compiled_calls, _with_refusal))
hooked_code = ProcessChange(partial(hook_compiled_code, _refuse_inductor_code))


# The code of a replay -----------------------------------------------------------------------------


class TaskCall:
    """The call of an operator of a task; an update replaces `issue`."""

    __slots__ = ("issue",)

    def __init__(self, call: Call) -> None:
        self.issue: Callable[[], object] = call.bound()


class _Names:
    """Names the objects that the code of a replay refers to, each once: `namespace` are the code's
    globals, by name."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {"copy": torch.Tensor.copy_, "checked": _checked_copies}
        self._by_id: dict[int, str] = {}

    def of(self, *values: object) -> list[str]:
        """Each value as text for the code."""
        texts = []
        for value in values:
            if value is None or value is True or value is False:
                texts.append(repr(value))
                continue
            name = self._by_id.get(id(value))
            if name is None:
                name = self._by_id[id(value)] = f"v{len(self._by_id)}"
                self.namespace[name] = value
            texts.append(name)
        return texts


def assemble(
    steps: Sequence[Step],
    tasks: dict[int, TaskCall],
    before: Sequence[Call] = (),
    fused: Fused | None = None,
    otherwise: Callable[[], None] | None = None,
) -> Callable[[], None]:
    """A function that issues the calls `before`, then every step in order; `tasks` has the calls,
    by index of the step, that an update may replace. Where the loops of `fused` would look for
    tensors at old addresses (`model.share_memory()`), it calls `otherwise`."""
    names = _Names()
    lines = ["def run():"]
    if fused is not None and fused.outside:
        moved = ["{}() != {}".format(*names.of(*each)) for each in fused.outside]
        lines.append(f"    if {' or '.join(moved)}: return {names.of(otherwise)[0]}()")
    lines += [f"    {_spell(call, names)}" for call in before]
    for index, step in enumerate(steps):
        if fused is not None and index in fused.calls:
            chain = fused.calls[index]
            lines += [] if chain is None else [f"    {_spell(chain, names)}"]
            continue
        task = tasks.get(index)
        if task is not None:
            (name,) = names.of(task)
            lines.append(f"    {name}.issue()")
            continue
        lowered = step.lowered
        call = _spell(lowered.call, names)
        if not lowered.copies:
            lines.append(f"    {call}")
        elif lowered.checked:
            copies, described = names.of(lowered.copies, step)
            lines.append(f"    checked({call}, {copies}, {described})")
        elif not lowered.flat:
            # One tensor is returned.
            (out,) = names.of(lowered.copies[0][1])
            lines.append(f"    copy({out}, {call})")
        else:
            lines.append(f"    r = {call}")
            outs = names.of(*(out for _, out in lowered.copies))
            for (position, _), out in zip(lowered.copies, outs, strict=True):
                lines.append(f"    copy({out}, r[{position}])")
            lines.append("    r = None")
    lines.append("    return None")
    exec(compile("\n".join(lines), "<graphrt replay>", "exec"), names.namespace)
    run: Callable[[], None] = names.namespace["run"]
    return run


def _spell(call: Call, names: _Names) -> str:
    fn, *values = names.of(call.fn, *call.args, *call.kwargs.values())
    for index, keyword in enumerate(call.kwargs, len(call.args)):
        values[index] = f"{keyword}={values[index]}"
    return f"{fn}({', '.join(values)})"


def _checked_copies(result: Any, copies: tuple[tuple[int, torch.Tensor], ...], step: Step) -> None:
    fresh = tree.tensors(result)
    for position, out in copies:
        new = fresh[position]
        if new.size() != out.size() or new.dtype != out.dtype:
            raise CaptureError(
                "an operator returned another shape than when it was captured",
                op=step.label,
                source=None if step.source is None else str(step.source),
                got=f"{new.dtype} {tuple(new.size())}",
                expected=f"{out.dtype} {tuple(out.size())}",
                advice=IN_PIECES,
            )
        if new.data_ptr() != out.data_ptr():
            unexpanded(out).copy_(unexpanded(new))
