"""Every error that graphrt raises on purpose, one class per cause, and every warning."""

from __future__ import annotations

import copy
import sys
import warnings
from types import FrameType
from typing import Any, ClassVar, NoReturn

from graphrt.core.base.texts import printable


class GraphRTError(Exception):
    """Root of all graphrt errors.

    The message says what happened, the value that was given, the value that was expected
    and one thing to try; each part is also an attribute.
    """

    usual_advice: ClassVar[str | None] = None
    """What to try, where that is the same for all errors of a class."""

    def __init__(
        self, what: str, *, got: object = None, expected: object = None, advice: str | None = None
    ) -> None:
        self.what = what
        self.got = got
        self.expected = expected
        self.advice = self.usual_advice if advice is None else advice
        super().__init__(self._message())

    def _message(self, **more: object) -> str:
        """The text: what happened, and below it each part that is known."""
        parts = {**more, "got": self.got, "expected": self.expected, "try": self.advice}
        lines = (f"{name}: {part}" for name, part in parts.items() if part is not None)
        return printable("\n  ".join((self.what, *lines)))


IN_PIECES = (
    'mark the function around it @eager_break and capture in pieces (mode="PIECEWISE"); it has to '
    "return new tensors, in every branch (in compiled code: @graphrt.opaque)"
)
"""Advice for what no graph can hold: under FULL, and in a wrapper that is not breakable, the mark
alone does nothing."""


class InvalidModeError(GraphRTError, ValueError):
    """An unknown graph mode, one that may not be used at run time, or one that would have had to
    step down (`strict`)."""


class InvalidBatchError(GraphRTError, ValueError):
    """A batch or descriptor whose numbers contradict each other."""


class InvalidOptionError(GraphRTError, ValueError):
    """An unknown option, or a value that it cannot have: capture sizes that do not ascend."""


class InvalidInputError(GraphRTError, ValueError):
    """An input of the wrong name, dtype, shape or device, or a bad `InputSpec`."""


class PlanFileError(GraphRTError, ValueError):
    """A file that holds no plan, or a damaged one, or that cannot be read or written."""


class StaleInputError(GraphRTError):
    """A graph would read memory that was given up, or did not find its step's inputs in the
    ring."""


class OverwrittenOutputError(GraphRTError, RuntimeError):
    """The memory of an earlier step's output was given to the step after it.

    Where torch itself finds out, as something touches the tensor, it raises a `RuntimeError` whose
    text begins with the name of this class.
    """


class UntrackedWeightsError(GraphRTError):
    """Nobody can say whether weights moved: graphs read tensors whose owner is not known."""


class StateTooLargeError(GraphRTError):
    """Saving the state around warm-up, declared or found, would exceed the byte limit."""


class PlatformError(GraphRTError):
    """No platform of that name, or one that this machine cannot run, or that was written for
    another version of the device contract."""


class MissingTorchNameError(GraphRTError, ImportError):
    """This torch lacks a private name that graphrt needs."""


class MissingCapabilityError(PlatformError):
    """The platform lacks a capability that the call needs."""

    usual_advice = "ask the platform's `capabilities` first, and do without, or take another one"


class UnsupportedHostError(GraphRTError, ImportError):
    """A library or an inference engine is missing, or of a version that graphrt does not know."""


class CaptureError(GraphRTError):
    """A capture failed; everything it had begun is rolled back.

    `op` is the offending operator and `source` the user's source line, where known.
    """

    def __init__(
        self, what: str, *, op: str | None = None, source: str | None = None, **parts: Any
    ) -> None:
        self.op = op
        self.source = source
        super().__init__(what, **parts)

    def _message(self, **more: object) -> str:
        return super()._message(operator=self.op, at=self.source, **more)

    def at(self, source: object) -> CaptureError:
        """The same error with a source line, unless it has one or there is none.

        Another object: the frame that raises it holds this one. If it raised what it holds, frame
        and error would keep each other, and graph memory, until garbage is collected.
        """
        if self.source is not None or source is None:
            return self
        located = copy.copy(self)
        located.source = str(source)
        located.args = (located._message(),)
        return located


class CaptureSyncError(CaptureError):
    """The forward read device data on the host while it was being captured."""


class PageableCopyError(CaptureSyncError):
    """A copy between the device and host memory that is not page-locked was captured."""


class RefusedOpError(CaptureError):
    """An operator that cannot be part of a graph was issued during capture, or one of the
    must-break list was captured all the same."""


class SideDoorError(CaptureError):
    """A graph would read a tensor that an eager part made and did not return: its next run makes
    another one."""


class FrozenMetadataError(CaptureError):
    """A graph would keep for ever what one step's `metadata` says."""


class ResourceExhaustedError(CaptureError):
    """The device ran out of memory, streams or graphs in the middle of a capture, or a plan's
    budget is too small for all of its graphs (`strict`)."""


class StreamBudgetError(ResourceExhaustedError):
    """The device has no stream left for another graph, or too few for this one."""


class LaunchQueueError(CaptureError):
    """torch_npu's queue of launches has ended: nothing can be captured or run in this process."""


class NestedCaptureError(CaptureError):
    """A capture was begun inside another capture of the same thread."""


class CaptureSealedError(CaptureError):
    """A graph would have had to be captured after `seal()`, or was announced to a wrapper that does
    not have it (`strict`)."""


class OutputError(CaptureError):
    """An output has no structure that a graph can hand out, or no known batch axis to cut."""


class BreakError(GraphRTError):
    """An eager break returned something its captured readers cannot use."""

    by_part: bool = True
    """Whether an eager part has returned it: the step may run eagerly then. Where the host has
    changed a number that graphs keep, it raises."""


class PoolError(GraphRTError):
    """Root of the errors about graph memory pools."""


class PoolBusyError(PoolError):
    """Two threads used one `GraphPool` at the same time."""


class PoolAsleepError(PoolError):
    """A step, a capture or a change of graphs in a pool between `suspend()` and `resume()`."""


class PoolClosedError(PoolError):
    """The pool, wrapper or runner was closed and cannot be used again."""


class TaskError(GraphRTError):
    """Root of the errors about updatable tasks."""


class MissingUpdateError(TaskError):
    """A graph with tasks was replayed without updates for all of them."""


class InvalidUpdateError(TaskError, ValueError):
    """An update names an unknown task or key, or its values do not fit the batch."""


class TaskContractError(TaskError):
    """A task re-issued other operators or tensors than the ones captured."""


class DeviceHangError(GraphRTError):
    """The device did not finish in time: something waits for a signal that never comes.

    `graph`, `step` and `task` say where, as far as that is known.
    """

    graph: str | None = None
    step: int | None = None
    task: str | None = None


class VerificationError(GraphRTError):
    """A replay differed from the same callable run eagerly on the same inputs, or an eager step has
    written an input."""


class BakedScalarError(BreakError, VerificationError):
    """A Python value is another one than the graph has: of an eager break, or a tensor that the
    forward makes of Python data."""


class RowsMixedError(VerificationError):
    """Live rows of a forward's results depend on its padding rows, or on how many there are."""


class PythonStateError(VerificationError):
    """A forward depends on Python state that it moves itself: replays repeat what it was."""


class CheckpointError(GraphRTError):
    """A checkpoint cannot be read; names the file and the missing key."""

    usual_advice = (
        "download the checkpoint again, whole, or write another one: config.json, tokenizer.json "
        "and safetensors files as transformers' save_pretrained() does"
    )


# Warnings -----------------------------------------------------------------------------------------


class InputRingWarning(UserWarning):
    """A device that could fetch inputs does not: they are copied before each launch."""


class PlanChangedWarning(UserWarning):
    """A saved plan comes out differently where it is loaded."""


class GraphsDroppedWarning(UserWarning):
    """Graphs of a plan did not fit on the device, or the memory of graphs did not come back after a
    sleep; their sizes run eagerly."""


class GraphMemoryWarning(UserWarning):
    """The graphs of a plan will take more memory than there is, or than they may; or a step's trial
    found none, and its graph is replayed unchecked."""


class StaleTensorWarning(UserWarning):
    """A forward leaves tensors of its graphs, or inputs, in Python: no replay makes new ones."""


class BreakWarning(UserWarning):
    """An eager break read tensors on the host and returned a Python number, which graphs keep."""


class GraphQuarantinedWarning(UserWarning):
    """Graphs that failed a check; their batches run eagerly from now on."""


for _class in [*vars().values()]:
    if isinstance(_class, type) and issubclass(_class, GraphRTError | Warning):
        _class.__module__ = "graphrt.errors"
del _class


def warn_caller(text: str, category: type[Warning]) -> None:
    """Warn of the line outside of graphrt that led here, through however many of its functions."""
    level = 1
    # The one name of it: a frame that has itself keeps the step's tensors until garbage is
    # collected.
    caller: FrameType | None = sys._getframe(0)
    while caller is not None and str(caller.f_globals.get("__name__")).startswith("graphrt."):
        level, caller = level + 1, caller.f_back
    warnings.warn(printable(text), category, stacklevel=level)


# What holds graphs --------------------------------------------------------------------------------


class Uncopied:
    """Base of what holds graphs: a copy would share them, and their memory, with the original."""

    __slots__ = ()

    def _refuse(self, *_: object) -> NoReturn:
        raise GraphRTError(
            f"a {type(self).__name__} cannot be copied or pickled",
            expected="one owner of each graph and its memory",
            advice="create another one; copy or pickle the plan and the model, not what was made",
        )

    # All three: a wrapper would look a missing one up in its forward.
    __copy__ = __deepcopy__ = __reduce_ex__ = _refuse
