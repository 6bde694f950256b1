"""The capture that this thread is in, for operators, eager parts and tasks that have to know of it;
and the garbage collector, which must not run in one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

import torch

from graphrt.core.base._undo import ProcessChange, Undo, undoing
from graphrt.core.base.errors import NestedCaptureError
from graphrt.core.device.contract import GraphWork


class Recording(Protocol):
    """A capture under way. In its eager parts no segment is open."""

    @property
    def segment_open(self) -> bool: ...

    @property
    def breakable(self) -> bool:
        """Whether `run_eagerly` may end the segment."""

    @property
    def must_break(self) -> bool:
        """Whether an eager part may not become part of a graph."""

    def run_eagerly(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        stub: Callable[..., Any] | None = None,
    ) -> Any:
        """End the segment, run `function`, or `stub` for it, begin the next segment; returns what
        readers capture."""

    def captured_ref(self, tensor: torch.Tensor) -> torch.Tensor:
        """How a captured entry holds a tensor: weakly if it is pool memory, else strongly."""

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether graphrt has made this tensor object for the forward alone: a change of its shape
        is lost with it, a change of its memory is not."""

    def check_read(self, values: Any, what: str) -> None:
        """Raise `SideDoorError` if a graph may not read a tensor of `values`; `what` begins the
        message. For readers that are no operators of torch."""

    def bracketed(self, issue: Callable[[], object]) -> Any:
        """Issue the operators of one task inside of its bracket; returns its handle."""

    def add_task(self, task: Any) -> None:
        """Note a `CapturedTask` of the open segment."""

    @property
    def task_count(self) -> int:
        """How many tasks the open segment has."""


active: ContextVar[Recording | None] = ContextVar("graphrt_capture", default=None)
"""The capture under way in this thread, whether a segment is open or an eager part runs."""

warming_up: ContextVar[bool] = ContextVar("graphrt_warm_up", default=False)
"""Whether this thread runs a forward for a warm-up or a trial: runners and wrappers in it run
eagerly."""

telling: ContextVar[bool] = ContextVar("graphrt_telling", default=False)
"""Whether this thread issues operators that only tell watches what a kernel does: they are none of
the forward's, and no graph has them."""

counted: ContextVar[GraphWork | None] = ContextVar("graphrt_counted_work", default=None)
"""What the warm-up that runs in this thread has issued so far, where that is counted."""

issued: ContextVar[list[Any] | None] = ContextVar("graphrt_issued_operators", default=None)
"""The operators that the step which captures in this thread has issued so far, where they are
noted."""

drawn_from: ContextVar[Collection[torch.Generator]] = ContextVar("graphrt_generators", default=())
"""The generators that a forward which captures in this thread gives to operators: a device's graph
has to know them before its capture begins."""

in_task: ContextVar[bool] = ContextVar("graphrt_task", default=False)
"""Whether the operators of a task are issued in this thread: what they make of its host arguments
is made again at every replay."""

under_way: set[int] = set()
"""Captures and warm-ups in any thread, by their `id`. While it is empty, as mostly, a step asks no
further. An id that is left in it by mistake only costs steps a look at the thread's variables."""


def enter_under_way(undo: Undo, owner: object) -> None:
    """Until `undo`, let steps know that a capture or warm-up runs: `owner`, which has to live as
    long, since its `id` stands for it."""
    undo.later(partial(under_way.discard, id(owner)))
    under_way.add(id(owner))


def current_capture() -> Recording | None:
    """The capture whose segment is open in this thread, or None: also None in eager parts."""
    recording = active.get()
    return recording if recording is not None and recording.segment_open else None


def is_inside_capture() -> bool:
    """Whether what is called now becomes part of a graph, or is run to warm one up.

    A replay here would not become part of the outer graph, operators do. In an eager part, which
    runs again at every replay, this is False: it may replay other graphs.
    """
    recording = active.get()
    return warming_up.get() if recording is None else recording.segment_open


@undoing
def without_inner_graphs(forward: Callable[[], Any], undo: Undo) -> Any:
    """Run the forward; runners and wrappers in it run eagerly, as in a warm-up."""
    undo.set(warming_up, True)
    enter_under_way(undo, forward)
    return forward()


def refuse_inside_capture(what: str) -> None:
    """Raise `NestedCaptureError` where `what` would run as part of something else's capture."""
    if is_inside_capture():
        raise NestedCaptureError(
            f"{what} was called inside the capture, or the warm-up, of something else",
            expected="a call outside of captures, or in an eager part",
            advice="call the runner itself: it becomes part of the outer graph",
        )


# The garbage collector ----------------------------------------------------------------------------

_FROZEN_BY_NOBODY = 5000
"""Python 3.12 has 375 objects frozen at its start: to thaw so few costs nothing."""


_frozen_by_host = False
"""Whether the host has frozen objects, as it said when asked last. An engine does so for good."""


def _keep_still(undo: list[Callable[[], object]]) -> None:
    """Turn collections off and freeze what is garbage; `undo` gets what ends that."""
    global _frozen_by_host
    # `int`, as there has to be a call: the host had collections off itself.
    undo.append(gc.enable if gc.isenabled() else int)
    gc.disable()
    # What the host froze itself must not be thawed with ours. To ask takes 80 ms where half a
    # million objects are frozen (vLLM): so not again, which would slow each capture beside steps.
    _frozen_by_host = _frozen_by_host or gc.get_freeze_count() >= _FROZEN_BY_NOBODY
    if not _frozen_by_host:
        undo.append(gc.unfreeze)
        gc.freeze()


_still = ProcessChange(_keep_still)


def freeze_garbage(undo: Undo, user: object) -> None:
    """Collect nothing until `undo` here, and that of all other users.

    A finalizer that runs inside a capture may free device memory or unload a module, which
    invalidates the capture. What is garbage already is frozen, so that not even an explicit
    collection by the forward finalizes it, unless the host has frozen something itself.
    """
    undo.later(partial(_still.leave, user))
    _still.enter(user)


@contextmanager
def frozen_gc() -> Iterator[None]:
    """No collection in the body, nor in that of any other user; see `freeze_garbage`."""
    user = object()
    try:
        _still.enter(user)
        yield
    finally:
        _still.leave(user)
