"""The steps, captures and trials of a runner, for observers from outside.

`attach` puts a `Tap` in place of `GraphRunner._run`, to which a runner's calls go, and adds a span
to its graph table. Detached, the runner calls its engine, or its twin in C, as before. An error
of an observer goes to the caller of the step: observers here only take notes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from graphrt._runner import GraphRunner
from graphrt.core.dispatch.reasons import Dispatch, Reason
from graphrt.core.replay.recording import is_inside_capture, under_way

WAYS = ("graph", "eager", "trial")
"""How a step ran: replayed, eagerly, or several times to be tried."""

_lock = threading.Lock()
"""Held while observers are attached or detached."""


@dataclass(frozen=True, slots=True)
class StepSeen:
    """One step as it ran. `dispatch` is None if it raised before it was dispatched."""

    began_s: float
    ended_s: float
    dispatch: Dispatch | None
    live_tokens: int
    tried: bool
    """Whether the step was a trial, which runs several times."""
    error: str | None
    """The class of the error that it raised."""

    @property
    def by_graph(self) -> bool:
        """Whether a graph served it."""
        return self.dispatch is not None and self.dispatch.reason is Reason.HIT

    @property
    def way(self) -> str:
        """One of `WAYS`."""
        return "trial" if self.tried else "graph" if self.by_graph else "eager"


@dataclass(frozen=True, slots=True)
class SpanSeen:
    """A capture or a trial, by its `graph`."""

    what: str
    """"capture" or "trial"."""
    graph: str
    began_s: float
    ended_s: float


class Observer:
    """Told of each step, capture and trial after it; `around` is entered before it."""

    def step(self, seen: StepSeen) -> None:
        """A step is over."""

    def span(self, seen: SpanSeen) -> None:
        """A capture or a trial is over, done or not."""

    def around(self, what: str, graph: str) -> AbstractContextManager[object] | None:
        """A context for the step ("step", its batch), capture or trial that begins."""
        return None


class Tap:
    """Runs a runner's steps while there are observers, and tells them of each step."""

    def __init__(self, runner: GraphRunner[Any]) -> None:
        # Not the runner itself: in that cycle its graphs would live until the collector runs.
        self.run: Callable[..., Any] = runner._run
        self.observers: tuple[Observer, ...] = ()
        self._engine = runner._engine
        # How many trials have begun: a step during which it grew was one.
        self._trials = 0

    def __call__(self, batch: Any, values: Any, updates: Any, metadata: Any, agreed: Any) -> Any:
        engine, observers = self._engine, self.observers
        if under_way and is_inside_capture():
            # The step is part of another runner's capture, which would record a range of it.
            return self.run(batch, values, updates, metadata, agreed)
        before, tokens, trials = engine.last_dispatch, engine.live_tokens, self._trials
        error: str | None = None
        with ExitStack() as stack:
            for each in observers:
                around = each.around("step", "" if batch is None else f"{batch[0]} tokens")
                if around is not None:
                    stack.enter_context(around)
            began = perf_counter()
            try:
                return self.run(batch, values, updates, metadata, agreed)
            except BaseException as raised:
                error = type(raised).__name__
                raise
            finally:
                ended = perf_counter()
                dispatch = engine.last_dispatch
                # An error before its dispatch: `last_dispatch` is that of the step before.
                if error is not None and dispatch is before:
                    dispatch = None
                live = engine.live_tokens - tokens
                if dispatch is not None and not live:
                    # The engine counts live tokens of graphs alone; an eager step has no padding.
                    live = dispatch.descriptor.num_tokens
                tried = self._trials != trials
                seen = StepSeen(began, ended, dispatch, live, tried, error)
                for each in observers:
                    each.step(seen)

    def span(self, what: str, graph: str) -> _Span:
        """A context that captures and trials enter: see `graphrt.core.runner.graph_table.Span`."""
        self._trials += what == "trial"
        return _Span(self.observers, what, graph)


class _Span(AbstractContextManager[object]):
    """Entered around one capture or trial: tells the observers of it at its end."""

    def __init__(self, observers: tuple[Observer, ...], what: str, graph: str) -> None:
        self._observers = observers
        self._what, self._graph = what, graph
        self._stack: ExitStack | None = None
        self._began = 0.0

    def __enter__(self) -> object:
        stack = ExitStack()
        for each in self._observers:
            around = each.around(self._what, self._graph)
            if around is not None:
                stack.enter_context(around)
        self._began, self._stack = perf_counter(), stack
        return self

    def __exit__(self, *exc_info: object) -> None:
        stack, self._stack = self._stack, None
        if stack is None:
            # The second exit of an interrupted capture.
            return
        seen = SpanSeen(self._what, self._graph, self._began, perf_counter())
        stack.close()
        for each in self._observers:
            each.span(seen)


def attach(runner: GraphRunner[Any], observer: Observer) -> Callable[[], None]:
    """Let `observer` follow a runner. Returns a function that ends it, and may be called twice."""
    with _lock:
        tap = runner._run
        if not isinstance(tap, Tap):
            tap = Tap(runner)
            runner.graphs.spans.append(tap.span)
            runner._run = tap
        tap.observers += (observer,)

    def detach() -> None:
        with _lock:
            tap.observers = tuple(each for each in tap.observers if each is not observer)
            if not tap.observers and runner._run is tap:
                runner._run = tap.run
                runner.graphs.spans.remove(tap.span)

    return detach
