"""Breakable capture: one forward becomes segments of graph with eager parts between them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, cast

import torch

from graphrt.core.base.errors import (
    CaptureError,
    GraphRTError,
    InvalidOptionError,
    MissedBreakError,
    NestedCaptureError,
)
from graphrt.core.base.garbage import frozen_gc
from graphrt.core.base.thread_mode import ThreadMode, dispatch_modes, remove_dispatch_mode, unseen
from graphrt.core.base.torch_names import has_kernel, schemas_of_operator
from graphrt.core.batch.context import ForwardContext
from graphrt.core.capture.bridges import Bridges, separate_strides
from graphrt.core.capture.source import source_of
from graphrt.core.device.graph import DeviceGraph
from graphrt.core.device.platform import Capability
from graphrt.core.replay.eager_part import EagerPart
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.segments import (
    CapturedTask,
    HookedSegment,
    Part,
    SegmentHooks,
    TaskedSegment,
)

P = ParamSpec("P")
R = TypeVar("R")


class Capture:
    """One capture under way: it drives segments and eager parts, and takes all back if it fails.

    `breakable` says whether `@eager_break` functions and the operators in `breaks` end the segment;
    where it is false, such an operator is an error if `must_break` is set and captured if not.
    """

    def __init__(
        self,
        pool: GraphPool,
        bridges: Bridges,
        context: ForwardContext,
        *,
        breakable: bool,
        breaks: frozenset[str] = frozenset(),
        must_break: bool = False,
        hooks: SegmentHooks | None = None,
        share_executables: bool = False,
    ) -> None:
        self.pool = pool
        self.bridges = bridges
        self.breakable = breakable
        self.parts: list[Part] = []
        self.graph: DeviceGraph | None = None
        self.tasks: list[CapturedTask] = []
        self._context = context
        self._depth = 0
        self._platform = pool.platform
        self._hooks = hooks
        self._share = share_executables
        self._sites = 0
        self._keeps_pool = False
        self._aliases: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._watch = _BreakWatch(self, breaks) if breaks and (breakable or must_break) else None

    @property
    def segment_open(self) -> bool:
        return self.graph is not None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Capture the body. If it raises, everything is rolled back and the error explained."""
        outer = _active.get()
        if outer is not None and outer.segment_open:
            raise NestedCaptureError(
                "a capture was begun inside another one",
                expected="one open capture per thread",
                advice="call the inner wrapper under mode NONE, or mark its caller @eager_break",
            )
        token = _active.set(self)
        self._depth = len(dispatch_modes())
        try:
            # A collection may destroy the graphs of others, which no device allows meanwhile.
            with frozen_gc(), self.pool.capturing(self._context):
                try:
                    self._begin()
                    yield
                    self._end()
                except BaseException as error:
                    self._roll_back()
                    # What is named already needs no explanation.
                    if isinstance(error, GraphRTError) or not isinstance(error, Exception):
                        raise
                    raise self._platform.explain(error).at(source_of(error)) from error
        finally:
            _active.reset(token)

    def run_eagerly(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """End the segment, run `function`, begin the next segment; returns what readers capture."""
        self._end()
        site = self._sites
        self._sites += 1
        part, result = self.bridges.run(self, site, function, args, kwargs)
        self.parts.append(part)
        self._begin()
        return result

    def captured_ref(self, tensor: torch.Tensor) -> torch.Tensor:
        """How a captured entry holds a tensor: weakly if it is pool memory, else strongly."""
        known = self._aliases.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        if not self.owns(tensor):
            return tensor
        # The alias itself must not be recorded, and replays outside of inference mode write it too.
        with unseen():
            alias = self._platform.weak_ref(self.pool.memory, tensor)
        # What one step computes for all layers is an argument of every break.
        self._aliases[id(tensor)] = weakref.ref(tensor), alias
        return alias

    def pooled_like(self, like: torch.Tensor) -> torch.Tensor | None:
        """Pool memory with the shape and dtype of `like`; None where there can be none."""
        # Only a graph that is captured already keeps the pool alive as long as the entry.
        if not self._keeps_pool or like.device.type != self._platform.device_type:
            return None
        with unseen(), self.pool.allocate():
            found = torch.empty_strided(
                like.shape, separate_strides(like), dtype=like.dtype, device=like.device
            )
        return found if self.owns(found) else None

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is memory of the pool."""
        return self._platform.owns(self.pool.memory, tensor)

    def _begin(self) -> None:
        if self._hooks is not None:
            self._hooks.before_capture()
        platform = self._platform
        graph = platform.new_shareable_graph() if self._share else platform.new_graph()
        try:
            self._platform.begin_capture(graph, self.pool.memory)
        except BaseException:
            self._platform.abort_capture(graph)
            raise
        self.graph = graph
        if self._watch is not None:
            self._watch.resume()

    def _end(self) -> None:
        graph = self.graph
        assert graph is not None
        if self._watch is not None:
            self._watch.suspend()
        if self._hooks is not None:
            self._hooks.end_of_capture()
        recorded = self._platform.end_capture(graph)
        self.graph = None
        tasks, self.tasks = self.tasks, []
        if not recorded:
            return
        self._keeps_pool = Capability.ALLOCATE_IN_POOL in self._platform.capabilities
        segment = self._segment(graph, tasks)
        self.parts.append(segment)
        if not self._platform.capture_executes:
            # A capturing call has the effect of one eager call, and what follows reads its results.
            segment.replay()
        if self._share and not tasks:
            self._platform.share_executable(graph, self.pool.memory)

    def _segment(self, graph: DeviceGraph, tasks: list[CapturedTask]) -> Part:
        if tasks:
            return TaskedSegment(self._platform, graph, tasks, self._hooks)
        return graph if self._hooks is None else HookedSegment(graph, self._hooks)

    def _roll_back(self) -> None:
        if self._watch is not None:
            self._watch.remove()
        graph, self.graph = self.graph, None
        if graph is not None:
            self._platform.abort_capture(graph)
        for left in reversed(dispatch_modes()[self._depth :]):
            left.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.pool.reset_graphs(graphs_of(self.parts))
        self.parts.clear()
        self.tasks.clear()


def graphs_of(parts: Iterable[Part]) -> list[DeviceGraph]:
    """The device graphs among the parts of a step, in order."""
    found: list[DeviceGraph] = []
    for part in parts:
        if isinstance(part, TaskedSegment | HookedSegment):
            found.append(part.graph)
        elif not isinstance(part, EagerPart):
            found.append(cast(DeviceGraph, part))
    return found


_active: ContextVar[Capture | None] = ContextVar("graphrt_capture", default=None)


def current_capture() -> Capture | None:
    """The capture whose segment is open in this thread, or None: also None in eager parts."""
    capture = _active.get()
    return capture if capture is not None and capture.segment_open else None


def eager_break(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function to run eagerly between two segments of a PIECEWISE capture.

    At replay it is called with the captured tensors and the captured Python values; what changes
    from step to step it must read from `current_context()`. A fresh tensor that it returns is
    copied into a fixed buffer. Outside of a breakable capture (and under FULL) it is just called.
    """

    @functools.wraps(function)
    def breaking(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        capture = _active.get()
        if capture is None or not capture.breakable or not capture.segment_open:
            return function(*args, **kwargs)
        return cast(R, capture.run_eagerly(function, args, kwargs))

    return breaking


class _BreakWatch(ThreadMode):  # type: ignore[no-untyped-call]
    """Sees every operator of an open segment and breaks at those of the list."""

    def __init__(self, capture: Capture, breaks: frozenset[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._capture = capture
        self._breaks = breaks
        for name in breaks:
            _check_break(name)
        self._entered = False
        self._handling = False

    def resume(self) -> None:
        # While an operator is being handled torch has taken this mode off its stack already.
        if not self._handling and not self._entered:
            self.__enter__()
            self._entered = True

    def suspend(self) -> None:
        if self._handling or not self._entered:
            return
        top = dispatch_modes()[-1]
        if top is not self:
            raise CaptureError(
                "a dispatch mode that the forward entered is still active where a segment ends",
                got=type(top).__name__,
                advice="leave the mode before the eager break, or enter it outside of the wrapper",
            )
        self._entered = False
        self.__exit__()

    def remove(self) -> None:
        """Leave the mode for good, whatever a failed forward left on top of it."""
        self._entered = False
        remove_dispatch_mode(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._listed(func):
            return func(*args, **kwargs)
        capture = self._capture
        if not capture.breakable:
            raise MissedBreakError(
                "an operator that must run eagerly would be captured",
                op=str(func),
                advice="use it as a splitting op, or mark the function around it @eager_break",
            )
        self._handling = True
        try:
            return capture.run_eagerly(func, args, kwargs)
        finally:
            self._handling = False

    def _listed(self, func: Any) -> bool:
        name: str = func._schema.name
        return name in self._breaks or f"{name}.{func._overloadname}" in self._breaks


def _check_break(name: str) -> None:
    """Raise `InvalidOptionError` for an operator that cannot be seen, and so would not break."""
    base, _, overload = name.partition(".")
    overloads = [s.overload_name for s in schemas_of_operator(base)]
    if overload:
        overloads = [known for known in overloads if known == overload]
    if not overloads:
        raise InvalidOptionError(
            "no operator of that name is registered",
            got=repr(name),
            expected='"namespace::name" or "namespace::name.overload"',
            advice="import the module that registers it before the capture",
        )
    functional = [known for known in overloads if not known.endswith("out")] or overloads
    full_names = [f"{base}.{known}" if known else base for known in functional]
    if any(has_kernel(full, "CompositeImplicitAutograd") for full in full_names):
        raise InvalidOptionError(
            "a composite operator is taken apart before it can be seen, so it cannot be a break",
            got=repr(name),
            expected="an operator with a kernel of its own",
            advice="mark the function that calls it @eager_break, or name what it is made of",
        )
