"""What a capture refuses, as one table; and which line of the user's code is to blame.

A rule is an error, its text, what would be right, and what to do instead. Whoever finds that a rule
is broken raises it: `raise HOST_DRAW()`, `raise METADATA()`, `raise MISSED_BREAK(got, part=name)`.
The rule itself looks for the line of the user's code.

A new refusal is one row. For operators by name it is a row of `OPERATORS`, and nothing else: every
capture of its devices and modes enters the guard for it. Others are raised where they are noticed:
`guard.py` looks at segments, and at operators of the captures that it is entered in; `recorder.py`
looks at eager parts. The CPU tape and the compiler have rows of their own, about operators that
only they see.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch

from graphrt.core.base import errors
from graphrt.core.base._undo import note, notes_of
from graphrt.core.base.texts import error_text
from graphrt.core.batch.modes import GraphMode

_GRAPHRT = Path(os.path.abspath(__file__)).parents[2]
_NOT_THE_USERS = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    # Not all of graphrt: the demo and the conformance suite are users of it.
    *(
        str(_GRAPHRT / part) + os.sep
        for part in ("core", "trust", "cpu", "cuda", "ascend", "accelerator", "compile", "observe")
    ),
    *(str(_GRAPHRT / f"_{name}.py") for name in ("graphed", "measure", "runner")),
    "<",
)


_generated: dict[str, Callable[[int], Source | None]] = {}
"""name of a generated file -> what returns the user's line that one of its lines stands for"""


class Source(NamedTuple):
    """A line of code; its text is only read when it is printed."""

    filename: str
    line: int
    function: str

    def __str__(self) -> str:
        code = linecache.getline(self.filename, self.line).strip()
        return f"{self.filename}:{self.line} in {self.function}: {code}"


def stands_for(filename: str, line_of: Callable[[int], Source | None]) -> Callable[[], None]:
    """Say which line of the user's code each line of generated code stands for, until what is
    returned is called."""
    _generated[filename] = line_of

    def forget() -> None:
        _generated.pop(filename, None)

    return forget


def user_source() -> Source | None:
    """The innermost frame outside torch and graphrt, or the line that generated code stands for."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # A `Source` only where needed: watches ask at every operator, deep inside of torch.
        code = frame.f_code
        if _is_users(code.co_filename) and not _is_torchs(frame):
            return Source(code.co_filename, frame.f_lineno, code.co_name)
        line_of = _generated.get(code.co_filename)
        source = None if line_of is None else line_of(frame.f_lineno)
        if source is not None:
            return source
        frame = frame.f_back
    return None


def makes_graphs(error: BaseException) -> bool:
    """Whether an error came from a model that makes CUDA graphs of its own, by torch.compile."""
    trace, files = error.__traceback__, set[str]()
    while trace is not None:
        files.add(Path(trace.tb_frame.f_code.co_filename).name)
        trace = trace.tb_next
    # The second is in what a tensor raises whose memory such a graph has used again.
    return "cudagraph_trees.py" in files or "cudagraph_mark_step_begin" in error_text(error)


def source_of(error: BaseException) -> Source | None:
    """The innermost frame outside torch and graphrt that `error` came through."""
    source = None
    trace = error.__traceback__
    while trace is not None:
        code, line = trace.tb_frame.f_code, trace.tb_lineno
        if _is_users(code.co_filename) and not _is_torchs(trace.tb_frame):
            source = Source(code.co_filename, line, code.co_name)
        elif code.co_filename in _generated:
            source = _generated[code.co_filename](line) or source
        trace = trace.tb_next
    return source


@cache
def _is_users(filename: str) -> bool:
    """Whether a file is neither of torch nor of the runtime parts of graphrt."""
    # A frame of contextlib may be between a capture and its body.
    return not filename.startswith(_NOT_THE_USERS) and filename != contextlib.__file__


def _is_torchs(frame: FrameType) -> bool:
    """Whether a frame outside of torch's folder is of torch: Inductor writes its code elsewhere."""
    return str(frame.f_globals.get("__name__")).startswith("torch.")


LATE = "no line of the forward is known; a device reports a fault late, at another call"

_ERROR = TypeVar("_ERROR", bound=BaseException)


def note_place(error: _ERROR, graph: str, phase: str = "") -> _ERROR:
    """Say once, in a note, which graph's capture `error` ended, in which phase, and at which line
    of the user's code, or that none is known. Returns the error."""
    begin = "while capturing "
    if not any(text.startswith(begin) for text in notes_of(error)):
        at = ""
        if not isinstance(error, errors.CaptureError) or error.source is None:
            late = isinstance(error, torch.AcceleratorError)
            place: object = LATE if late else source_of(error)
            # Other findings of graphrt's own name their line in their text, if they have one.
            if isinstance(error, errors.CaptureError) or not isinstance(error, errors.GraphRTError):
                place = place or "no line of the forward is known"
            at = f"\n  at: {place}" if place else ""
        note(error, f"{begin}{graph}{phase}{at}")
    return error


class Refusal(NamedTuple):
    """A rule of the table; `what` and `expected` may name words that a call gives."""

    error: type[errors.GraphRTError]
    what: str
    advice: str
    expected: str | None = None
    has_line: bool = True
    """Whether a line of the user's code is to blame, and still on the stack."""

    def __call__(
        self,
        got: object = None,
        *,
        op: object = None,
        source: Source | None = None,
        **words: object,
    ) -> errors.GraphRTError:
        """The error, `op` and the line included where its class has room for them."""
        at: dict[str, str | None] = {}
        if issubclass(self.error, errors.CaptureError):
            if self.has_line and source is None:
                source = user_source()
            at = {
                "op": None if op is None else str(op),
                "source": None if source is None else str(source),
            }
        what, expected = self.what, self.expected
        if words:
            what, expected = what.format(**words), expected and expected.format(**words)
        return self.error(what, got=got, expected=expected, advice=self.advice, **at)


class OperatorRule(NamedTuple):
    """Refuses operators by name in every capture of its devices and modes, at every level of
    checks, in runners and wrappers alike. It costs such a capture microseconds an operator.

    Not seen are composite operators, which are taken apart before, and operators inside of compiled
    code and of a custom operator's body. Those of `breaks=`, and of eager parts, are in no graph,
    so they pass.
    """

    operators: frozenset[str]
    """Names such as "aten::cumsum", or "aten::cumsum.out" for one overload."""
    refusal: Refusal
    devices: frozenset[str] | None = None
    """The types of devices ("cuda") whose own capture does not refuse them; None is all."""
    modes: frozenset[GraphMode] = frozenset({GraphMode.PIECEWISE, GraphMode.FULL})
    is_broken: Callable[[tuple[Any, ...], Mapping[str, Any]], bool] = lambda args, kwargs: True
    """Whether a call with these arguments breaks the rule."""


@cache
def rules_for(
    rules: tuple[OperatorRule, ...], device_type: str, mode: GraphMode
) -> Mapping[str, tuple[OperatorRule, ...]]:
    """Name of an operator -> those of the `rules` that hold for it in such captures."""
    by_name: dict[str, tuple[OperatorRule, ...]] = {}
    for rule in rules:
        if mode in rule.modes and (rule.devices is None or device_type in rule.devices):
            for name in rule.operators:
                by_name[name] = (*by_name.get(name, ()), rule)
    return by_name


def described(tensor: torch.Tensor) -> str:
    """A tensor as errors name it."""
    return f"{tensor.dtype} {tuple(tensor.shape)}"


# Captures -----------------------------------------------------------------------------------------

NESTED_CAPTURE = Refusal(
    errors.NestedCaptureError,
    "a capture was begun inside another one",
    expected="one open capture per thread",
    advice="capture it before the outer capture begins, or mark its caller @eager_break",
    has_line=False,
)
MODE_STILL_ACTIVE = Refusal(
    errors.CaptureError,
    "a dispatch mode that the forward entered is still active where a segment ends",
    advice="leave the mode before the eager break, or enter it around the call of the runner",
    has_line=False,
)
METADATA = Refusal(
    errors.FrozenMetadataError,
    "the forward read a step's metadata while it was being captured: every replay would use the "
    "value of this step",
    advice="read it in an eager break (under PIECEWISE), where it is None in warm-ups and "
    "captures; pass it as an input or as a host argument of a task; or, if one value is right for "
    "every step of a graph, such as the longest context, "
    "declare it with Host(metadata=...)",
)
NOT_STRIDED = Refusal(
    errors.OutputError,
    "{what} returns a tensor that has no strided memory of its own",
    expected="a strided tensor",
    advice="return to_dense() of it, from an @eager_break if the device cannot capture the "
    "operator; or return the parts of it",
    has_line=False,
)

# Tensors of the caller, and work of the host ------------------------------------------------------

NESTED_PADDING = Refusal(
    errors.CaptureSyncError,
    "a nested tensor was made of a mask that hides all: in a warm-up every row is padding",
    expected="a padded tensor, or a mask whose padding hides nothing",
    advice="have nn.TransformerEncoder pad: enable_nested_tensor=False where it is made, or "
    "use_nested_tensor = False on it; where an eager part makes it, InputSpec(pad=) with the value "
    "of a place that is not hidden",
)
OWN_GRAPHS = Refusal(
    errors.CaptureError,
    "the model makes CUDA graphs of its own, by torch.compile",
    expected="compiled code without graphs: graphrt captures it",
    advice='torch.compile(model) in place of mode="reduce-overhead" or "max-autotune"; '
    'mode="max-autotune-no-cudagraphs" tunes without them',
    has_line=False,
)
RESHAPED_ARGUMENT = Refusal(
    errors.RefusedOpError,
    "the forward changes the shape or the memory of its argument, or of an eager part's, in place: "
    "no replay repeats that",
    advice="change a view of it: x.unsqueeze(0), x.view(...)",
    has_line=False,
)
HOST_ARGUMENT = Refusal(
    errors.RefusedOpError,
    "an argument is a tensor on the host: every replay would use its numbers of the capture, and "
    "none would write it",
    advice="give the forward a tensor of the device; or, with a descriptor (variant=) for each of "
    'its values, a Python number or GraphOptions(host_arguments="bake")',
)
HOST_DRAW = Refusal(
    errors.RefusedOpError,
    "random numbers were drawn on the host: every replay would have those of the capture",
    advice="draw them on the device (device=...), or in an eager break",
    has_line=False,
)

PAGEABLE_COPY = Refusal(
    errors.PageableCopyError,
    "a tensor of the host's, which the forward did not make, is copied to the device: replays "
    "would not see what the host writes there",
    expected="tensors on the device, or constants that the forward makes itself",
    advice="move it to the device before the capture (module.to(device)), or pass it as an input",
)
WRITTEN_CONSTANT = Refusal(
    errors.BakedScalarError,
    "a NumPy array, a number in a host tensor, or a constant of an earlier piece was written since "
    "a graph has a copy of it: the graph has the values of its capture for ever",
    expected="the values of the capture",
    advice="pass it as an input, or keep it in a tensor on the device and write that in place "
    "(copy_); recapture() after the host has changed it for good",
    has_line=False,
)

# Eager parts --------------------------------------------------------------------------------------

MISSED_BREAK = Refusal(
    errors.RefusedOpError,
    "an eager part would be captured: a function that is marked @eager_break, or an operator that "
    "must run eagerly",
    expected="a wrapper that breaks there, or pieces without eager parts",
    advice="make the wrapper with breakable=True; in a compiled module, name the operator in "
    'splitting_ops, or mark the function @graphrt.opaque("namespace::name")',
)
TRANSFORMED_BREAK = Refusal(
    errors.CaptureError,
    "eager break {part} is called inside of a transform (torch.vmap, or another of torch.func), "
    "which replays do not enter",
    expected="eager parts that contain their transforms, or none",
    advice="mark the function that calls torch.vmap @eager_break",
)
HIDDEN_TENSOR = Refusal(
    errors.SideDoorError,
    "eager break {part} reads a tensor that the graph made and that it was not given: replays "
    "would find the one of the graph that was captured last",
    expected="arguments of the eager part, or memory that no graph makes again",
    advice="pass it as an argument of the eager part",
)
SIDE_DOOR = Refusal(
    errors.SideDoorError,
    "{what} a tensor that eager break {part} made{how} and did not return: replays would see the "
    "one of the capture",
    expected="results of the eager part, or memory that was there before and is written there",
    advice="return it from the eager part and use the result, or make it once, before the capture, "
    "and write into it (copy_, out=)",
)
WRITTEN_COPY = Refusal(
    errors.BreakError,
    "the forward writes into a result of eager break {part}, which others hold too, or which it "
    "returned twice: graphs have a copy of it, and the write would reach that alone",
    expected="a fresh tensor, or memory that is written where it is",
    advice="return a clone() from the eager part, or write into the tensor itself",
)

# Operators by name --------------------------------------------------------------------------------

OPERATORS: tuple[OperatorRule, ...] = ()
"""None yet: what a device cannot capture it refuses itself."""

REGISTERED_REDUCE = Refusal(
    errors.RefusedOpError,
    "a custom all-reduce registers the graph's memory with other ranks, and that memory sleeps: "
    "after a wake they would read the pages of before",
    expected="an all-reduce by a buffer of its own, or by NCCL",
    advice="leave CustomAllreduce.capture() out, or disable_custom_all_reduce; or make the pool "
    "without around_memory=",
)
OF_SLEEPING_MEMORY = (
    OperatorRule(
        # (handle, input, output, address of a buffer that is registered already or 0, its bytes)
        frozenset({"_C_custom_ar::all_reduce", "sgl_kernel::all_reduce"}),
        REGISTERED_REDUCE,
        is_broken=lambda args, kwargs: [*args[3:4], kwargs.get("reg_buffer")][0] == 0,
    ),
)
"""Also for captures into memory that sleeps (`GraphPool(around_memory=)`)."""
