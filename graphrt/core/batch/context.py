"""The forward context: what wrappers read at run time to know which graph a step is."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextvars import ContextVar, Token, copy_context
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar

from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.option_values import check_callable, check_kind
from graphrt.core.batch.descriptor import Batch, BatchDescriptor, checked_batch
from graphrt.core.batch.modes import GraphMode

P = ParamSpec("P")
R = TypeVar("R")

_NONE, _PIECEWISE, _FULL = GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL


@dataclass(eq=False)
class CaptureTransaction:
    """Allows the wrappers of a step to capture while it is in their context, and takes back what
    they did: all of them capture, or none has.

    - `slot`: the dispatcher's slot for their entries. The context itself has no slot while it
      captures: so a wrapper looks up its entry by descriptor. If it finds one, it was called twice
      in the step, and raises.
    - `fixed`: the addresses of the storages in which every step of the graph finds its inputs.
    - `metadata_is_declared`: the context's metadata is right for every step.
    - `lifting`: whether constants are lifted: see constants.py. None where no runner captures.
    - `tells_pool`: a wrapper tells its pool what it captured; else the maker of this object does.
    - `may_draw`: no warm-up has shown that the forward draws no random numbers on the host.
    - `work`: the `GraphWork` that a warm-up of the same kind issued, or None.
    - `replays`: called before a segment is replayed at its capture, with whether it is the last;
      returns whether to replay it. None where the host uses the result of the capture.
    - `dispatcher`: the `GraphDispatcher` that serves the graph. A wrapper withdraws it there before
      it destroys its entry.
    - `task_names`: collects the tasks of the step, and their groups.
    - `captured`: the owner of each capture so far, and what destroys it.
    """

    slot: int = -1
    fixed: frozenset[int] = frozenset()
    metadata_is_declared: bool = False
    lifting: Any = None
    tells_pool: bool = True
    may_draw: bool = True
    work: Any = None
    replays: Callable[[bool], bool] | None = None
    dispatcher: Any = None
    task_names: set[str] = field(default_factory=set)
    captured: list[tuple[Any, Callable[[], None]]] = field(default_factory=list)

    def add(self, owner: Any, undo: Callable[[], None]) -> None:
        """Note that `owner` captures something; `undo` takes it back, however far that got."""
        self.captured.append((owner, undo))

    def rollback(self) -> None:
        """Take everything back, the last capture first; called again it goes on."""
        self.task_names.clear()
        while self.captured:
            _, undo = self.captured[-1]
            undo()
            self.captured.pop()


class Announcer(Protocol):
    """Announces steps as those of a graph, and counts where the graph was not replayed."""

    def not_replayed(self, context: ForwardContext) -> None:
        """Note that a wrapper ran the step of this context eagerly, as it has no graph for it."""


@dataclass(slots=True, eq=False, repr=False)
class ForwardContext:
    """One step: its runtime mode, the descriptor of its graph, and its task updates.

    - `slot`: the dispatcher's index of the graph; -1: look it up by descriptor.
    - `metadata`: the host's, for eager parts that need this step's values. To read it elsewhere
      while a graph is captured raises `FrozenMetadataError`.
    - `num_reqs`: the padded number of requests where the descriptor leaves it open.
    - `query_len`: the tokens of each request of the live batch; None where they differ, nobody
      said, or a graph is captured. A graph of mixed batches serves uniform ones too, which eager
      parts may run faster.
    - `live`: the batch that the step serves, None where nobody said. Task updates are checked
      against it.
    - `dispatcher`: told by wrappers that have no graph for the step.
    - `capture`: allows wrappers to capture.
    - `enlist`: called by a compiled module that runs in a warm-up or capture, to be known.
    - `graph_mode`: of an eager step (mode NONE) that stands for a graph, its mode: a warm-up, a
      trial's run, a step in quarantine. Compiled modules run the code that the graph has captured.
    - `token`: unique to one step, None outside of one.

    `mode` is NONE, PIECEWISE or FULL, or its name; others raise `InvalidModeError`.

    Entering it makes it `current_context()` for this thread. It may be entered again after it was
    left, which is another step. A host that has a context of its own, and wrappers that read this
    one from it, enters nothing and calls `begin_step()`.
    """

    mode: GraphMode
    descriptor: BatchDescriptor | None = None
    slot: int = -1
    updates: Any = None
    metadata: Any = None
    num_reqs: int | None = None
    query_len: int | None = None
    dispatcher: Announcer | None = None
    live: Batch | None = None
    capture: CaptureTransaction | None = None
    enlist: Callable[[Any], None] | None = field(default=None, init=False)
    graph_mode: GraphMode = field(default=_NONE, init=False)
    token: object = field(default=None, init=False)

    def __post_init__(self) -> None:
        # One is made for every step: these are all that a right mode costs.
        mode = self.mode
        if mode is not _FULL and mode is not _PIECEWISE and mode is not _NONE:
            self.mode = GraphMode.parse_runtime(mode, "a step runs in one runtime mode")

    def begin_step(self) -> None:
        """Say that another step of this context begins: the calls of PIECEWISE wrappers that read
        it are one step from now on, which ends where the next one begins in their pool.

        For hosts whose wrappers have a `read_context`; without it every call is a step of its own.
        A context that is kept and begun again gets a slot, if it has none, by which wrappers find
        their graphs; no dispatcher has announced one then.
        Raises `InvalidOptionError` inside of `with` this context, which is a step by itself.
        """
        if isinstance(self.token, Token):
            raise InvalidOptionError(
                "begin_step() was called inside of `with` this context, which is a step by itself",
                got="begin_step() inside of `with context:`",
                expected="`with context:` for each step, or begin_step()",
                advice="leave begin_step() out",
            )
        if self.token is not None and self.slot < 0:
            # Begun for the second time: by a slot graphs are found without hashing a descriptor.
            self.slot = next(_numbers)
        self.token = object()

    @property
    def announced(self) -> bool:
        """Whether the slot is a dispatcher's, which stands for a graph, not one of `begin_step`."""
        return 0 <= self.slot < _FIRST_NUMBER

    def __enter__(self) -> ForwardContext:
        try:
            self.token = _set_current(self)
        except BaseException:  # in place of `@undoing`: every step enters a context
            self.leave()
            raise
        return self

    # Named arguments: packing them into a tuple would cost more than leaving the context.
    def __exit__(self, kind: object, error: object, trace: object) -> None:
        token = self.token
        self.token = None
        _reset_current(token)  # type: ignore[arg-type]

    def leave(self) -> None:
        """Leave it where an interrupt may have kept `with` from doing so; else nothing changes."""
        token, self.token = self.token, None
        if current_context() is self:
            if isinstance(token, Token):
                _reset_current(token)
            else:
                # An interrupt has lost the context before this one: as a rule there was none.
                _set_current(None)

    def __repr__(self) -> str:
        return f"ForwardContext({self.mode.name}, {self.descriptor})"


_FIRST_NUMBER = 1 << 62
"""More than any slot of a dispatcher: contexts that are kept get slots from here on."""
_numbers = itertools.count(_FIRST_NUMBER)

_current: ContextVar[ForwardContext | None] = ContextVar("graphrt_forward_context", default=None)

_set_current = _current.set
_reset_current = _current.reset

current_context: Callable[[], ForwardContext | None] = _current.get
"""The context of this step, or None outside of one. (The bound C method: it is on the hot path.)"""


def forward_context(
    mode: GraphMode | str,
    descriptor: BatchDescriptor | None = None,
    *,
    slot: int = -1,
    updates: Any = None,
    metadata: Any = None,
    num_reqs: int | None = None,
    query_len: int | None = None,
    dispatcher: Announcer | None = None,
    live: Batch | None = None,
) -> ForwardContext:
    """A context to run one step in: `with forward_context(mode, descriptor): model(...)`.

    `num_reqs` (padded) and `query_len` (of a uniform live batch) are for graphs of mixed batches.
    `dispatcher` is the `GraphDispatcher` that found the graph, which counts the step anew where a
    wrapper cannot replay it (`GraphDispatcher.step` makes such a context). `live` is the batch that
    is served: updates of tasks that leave out some of its requests are refused then.
    Raises `InvalidModeError` unless `mode` is NONE, PIECEWISE or FULL, `InvalidBatchError` for a
    `live` that is no batch, and `InvalidOptionError`.
    """
    if live is not None:
        checked_batch(live)
    if type(slot) is not int:
        check_kind("slot", slot, int, optional=False, example="-1")
    what: Any = mode  # or its name
    return ForwardContext(
        what, descriptor, slot, updates, metadata, num_reqs, query_len, dispatcher, live
    )


def carry_context(function: Callable[P, R]) -> Callable[P, R]:
    """`function` bound to the context of this thread, for running it in another one.

    New threads start without context variables, so wrappers called there would run eagerly. The
    result may be called any number of times, in several threads at once.
    """
    check_callable("function", function, "carry_context(model)")
    context = copy_context()

    @functools.wraps(function)
    def carried(*args: P.args, **kwargs: P.kwargs) -> R:
        # A Context cannot be entered twice at once, so every call runs in a copy of its own.
        return context.copy().run(function, *args, **kwargs)

    return carried
