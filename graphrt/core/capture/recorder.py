"""Breakable capture: one forward becomes segments of graph with eager parts between them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch

from graphrt.core.base import (
    BreakError,
    GraphRTError,
    Undo,
    dispatch_modes,
    freeze_garbage,
    outside_modes,
    set_for_capture,
    thaw_garbage,
    tree,
    unseen,
)
from graphrt.core.batch import ForwardContext
from graphrt.core.capture._leaves import (
    are_same,
    can_change,
    memory_of,
    place_of,
    strided,
    weak_storage,
)
from graphrt.core.capture.breaks import BreakWatch
from graphrt.core.capture.bridges import Bridges, separate_strides
from graphrt.core.capture.constants import Constants
from graphrt.core.capture.refusals import (
    Copies,
    Given,
    SideDoors,
    hand_back,
    inside_capture,
    side_doors,
    source_of,
    withhold,
)
from graphrt.core.device import Capability, DeviceGraph, Unexplained
from graphrt.core.replay import (
    CapturedTask,
    EagerPart,
    GraphPool,
    HookedSegment,
    Part,
    Recording,
    SegmentHooks,
    TaskedSegment,
    active,
    graphs_of,
    name_of,
    on_own_containers,
    on_own_tensors,
    settle,
    under_way,
)

R = TypeVar("R")


class Capture:
    """One capture under way: it drives segments and eager parts, and takes all back if it fails.

    `breakable` says whether `@eager_break` functions and the operators in `breaks` end the segment;
    where it is false, they are errors if `must_break` is set and captured if not.
    """

    def __init__(
        self,
        pool: GraphPool,
        bridges: Bridges,
        context: ForwardContext,
        given: Given,
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
        self.must_break = must_break
        self.parts: list[Part] = []
        self.graph: DeviceGraph | None = None
        self.tasks: list[CapturedTask] = []
        self.context = context
        self._depth = 0
        self._platform = pool.platform
        self._hooks = hooks
        self._share = share_executables
        self._sites = 0
        self._keeps_pool = False
        self._aliases: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}
        self._doors = SideDoors() if (doors := side_doors.get()) is None else doors
        self._doors.begin_capture()
        self._copies = Copies()
        breaks = breaks if breakable or must_break else frozenset()
        lifts = self._platform.needs_pinned_copies and (
            context.capture is None or context.capture.lifts_constants
        )
        self._constants = Constants(pool) if lifts else None
        given.lift(
            None if self._constants is None else self._constants.take,
            later=self._platform.needs_pinned_copies and not lifts,
        )
        self._watch: BreakWatch | None = BreakWatch(
            self, breaks, self._doors, self._copies, given, self._constants
        )

    @property
    def segment_open(self) -> bool:
        return self.graph is not None

    def record(self, body: Callable[[], R]) -> R:
        """Capture `body`; returns its result. If it raises, or is interrupted, everything is rolled
        back and the error explained."""
        outer = active.get()
        if outer is not None and outer.segment_open:
            raise inside_capture()
        # A lock of C: no interrupt comes between taking it and the body, nor before it is released.
        with self.pool.capture_lock:
            return self._record(body, outer)

    def _record(self, body: Callable[[], R], outer: Recording | None) -> R:
        self._depth = len(dispatch_modes())
        undo = Undo()
        try:
            undo.enter(self.pool.on_device())
            set_for_capture(undo)
            undo.later(partial(active.set, outer))
            undo.later(partial(under_way.discard, id(self)))
            under_way.add(id(self))
            active.set(self)
            self.pool.will_put_back("a capture", undo.later)
            # A collection may destroy the graphs of others, which no device allows meanwhile.
            undo.later(partial(setattr, self, "_watch", None))  # each knows the other
            undo.later(partial(thaw_garbage, self))
            freeze_garbage(self)
            self._enter_pool(undo)
            self._begin()
            result = body()
            self._end()
            settle(self.parts)
            if self._constants is not None:
                self._constants.hand_on(result)
            undo.now()
            return result
        except BaseException as error:
            try:
                self.discard()
            finally:
                undo.now()
            # What is named already needs no explanation.
            if isinstance(error, GraphRTError) or not isinstance(error, Exception):
                raise
            explained = self._platform.explain(error)
            if isinstance(explained, Unexplained):
                raise
            raise explained.at(source_of(error)) from error

    def _enter_pool(self, undo: Undo) -> None:
        """Make the capture stream current, behind all that was done in the pool.

        Undone, the caller's stream is current and behind the capture, and it counts as the last
        that used the pool: a step on any other one waits for it.
        """
        pool = self.pool
        pool.check_open()
        pool.enter_capture(self.context)
        pool.follow_stream()
        work = None if self.context.capture is None else self.context.capture.work
        undo.enter(self._platform.on_stream(self._platform.capture_stream(pool.stream, work)))
        pool.expire_outputs()

    def run_eagerly(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """End the segment, run `function`, begin the next segment; returns what readers capture."""
        self._end()
        site = self._sites
        self._sites += 1
        given = tree.tensors((args, kwargs))
        self.check_read(given, f"eager break {name_of(function)} is given")
        before = tree.leaves((args, kwargs)) if can_change(args, kwargs) else None
        shapes = list(map(place_of, given))
        kept_args, kept_kwargs = tree.map_tensors(self.captured_ref, (args, kwargs))
        apart = tree.map_tensors(self._kept_apart, (args, kwargs))
        known = memory_of(given)

        def hidden(tensor: torch.Tensor) -> bool:
            return memory_of(tensor).isdisjoint(known) and self.owns(tensor)

        result = self._doors.watched(function, args, kwargs, hidden, self._copies.check)
        strided(result, f"eager break {name_of(function)}")
        fresh: set[int] = set()

        def stays(path: str, tensor: torch.Tensor) -> bool:
            storage = tensor.untyped_storage().data_ptr()
            if storage in known or self.owns(tensor):
                return True
            if storage in fresh:
                raise BreakError(
                    f"eager break {name_of(function)} returned two tensors that share memory",
                    got=f"the one at {path or 'the top'}",
                    expected="separate tensors, which separate buffers can stand for",
                    advice="return one of them, or clone it",
                )
            fresh.add(storage)
            return False

        # Readers get strong references, so that liveness is theirs; the entry keeps weak ones.
        readable, aliased = unseen(
            partial(self.bridges.fix, site, result, stays=stays, allocate=self.pooled_like)
        )
        self.give(leaf for path, leaf in tree.leaves(readable) if path not in aliased)
        recorded = tree.map_tensors(self._kept_apart, readable)
        changed = before is not None and not are_same(before, tree.leaves((args, kwargs)))
        # Though this call changed nothing in them: a later one may.
        called = function if before is None else on_own_containers(function)
        if not changed and list(map(place_of, tree.tensors((args, kwargs)))) != shapes:
            called, (kept_args, kept_kwargs) = on_own_tensors(function), apart
        self.parts.append(EagerPart(called, kept_args, kept_kwargs, recorded, aliased, apart))
        leaves = zip(tree.tensors(result), tree.tensors(readable), strict=True)
        moved = [(weak_storage(was), copy) for was, copy in leaves if was is not copy]
        # Its own reference to what was copied to its place would look like another way out.
        del result, leaves
        for was, copy in moved:
            if not was.expired():  # type: ignore[no-untyped-call]
                self._copies.note(name_of(function), copy)
        self._doors.settle()
        self._begin()
        return readable

    def bracketed(self, issue: Callable[[], object]) -> Any:
        """Issue the operators of one task inside of its bracket; returns its handle."""
        graph = self.graph
        assert graph is not None
        self._platform.task_begin(graph)
        issue()
        return self._platform.task_end(graph)

    def add_task(self, task: CapturedTask) -> None:
        """Note a task of the open segment."""
        self.tasks.append(task)

    def give(self, leaves: Iterable[Any]) -> None:
        """Note tensors that the forward gets as objects of its own."""
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self._made[id(leaf)] = weakref.ref(leaf)

    def made(self, tensor: torch.Tensor) -> bool:
        """See `Recording.made`."""
        found = self._made.get(id(tensor))
        return found is not None and found() is tensor

    def forward_returned(self) -> None:
        """What is captured from here on is none of the forward's operators."""
        if self._watch is not None:
            self._watch.issued = None

    def check_read(self, values: Any, what: str) -> None:
        """See `Recording.check_read`."""
        if self.breakable:
            self._doors.check(values, what)

    def captured_ref(self, tensor: torch.Tensor) -> torch.Tensor:
        """How a captured entry holds a tensor: weakly if it is pool memory, else strongly."""
        known = self._aliases.get(id(tensor))
        # An eager part may have given it another shape, or other memory.
        if known and known[0]() is tensor and place_of(known[1]) == place_of(tensor):
            return known[1]
        # An alias of memory would lose a conjugation that torch has put off.
        if not self.owns(tensor) or tensor.is_conj() or tensor.is_neg():
            return tensor
        # The alias itself must not be recorded, and replays outside of inference mode write it too.
        alias = unseen(partial(self._platform.weak_ref, self.pool.memory, tensor))
        # What one step computes for all layers is an argument of every break.
        self._aliases[id(tensor)] = weakref.ref(tensor), alias
        return alias

    def _kept_apart(self, tensor: torch.Tensor) -> torch.Tensor:
        """`captured_ref`, but never the forward's own tensor, which may yet become another view."""
        found = self.captured_ref(tensor)
        return unseen(tensor.detach) if found is tensor else found

    def pooled_like(self, like: torch.Tensor) -> torch.Tensor | None:
        """Pool memory with the shape and dtype of `like`; None where there can be none."""
        # Only a graph that is captured already keeps the pool alive as long as the entry.
        if not self._keeps_pool or like.device.type != self._platform.device_type:
            return None

        def allocated() -> torch.Tensor:
            undo = Undo()
            try:
                undo.enter(self.pool.allocate())
                made = torch.empty_strided(
                    like.shape, separate_strides(like), dtype=like.dtype, device=like.device
                )
                undo.now()
                return made
            except BaseException:
                undo.now()
                raise

        found = unseen(allocated)
        return found if self.owns(found) else None

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is memory of the pool; one that is not strided has no one memory."""
        if tensor.layout is not torch.strided:
            return False
        return self._platform.owns(self.pool.memory, tensor)

    def _begin(self) -> None:
        if self._hooks is not None:
            self._hooks.before_capture()
        platform = self._platform
        graph = platform.new_shareable_graph() if self._share else platform.new_graph()
        # First, so that whatever interrupts the rest, there is something to take back.
        self.graph = graph
        try:
            platform.begin_capture(graph, self.pool.memory)
        except BaseException:
            platform.abort_capture(graph)
            self.graph = None
            raise
        withhold(self.context)
        if self._constants is not None:
            self._constants.begin(graph)
        if self._watch is not None:
            self._watch.resume()

    def _end(self) -> None:
        graph = self.graph
        assert graph is not None
        hand_back(self.context)
        if self._watch is not None:
            self._watch.suspend()
        if self._constants is not None:
            self._constants.end()
        if self._hooks is not None:
            self._hooks.end_of_capture()
        recorded = self._platform.end_capture(graph)
        tasks, self.tasks = self.tasks, []
        if not recorded:
            self.graph = None
            return
        self._keeps_pool = Capability.ALLOCATE_IN_POOL in self._platform.capabilities
        segment = self._segment(graph, tasks)
        self.parts.append(segment)
        self.graph = None
        if not self._platform.capture_executes:
            # A capturing call has the effect of one eager call, and what follows reads its results.
            # As at a step, no dispatch mode of the capturing call sees what a replay does.
            outside_modes(segment.replay)
        if self._share and not tasks:
            self._platform.share_executable(graph, self.pool.memory)

    def _segment(self, graph: DeviceGraph, tasks: list[CapturedTask]) -> Part:
        hooks = self._hooks if self._constants is None else self._constants.hooks(self._hooks)
        if tasks:
            return TaskedSegment(self._platform, graph, tasks, hooks)
        return graph if hooks is None else HookedSegment(graph, hooks)

    def discard(self) -> None:
        """Take back what is captured, and what is open; once more changes nothing."""
        hand_back(self.context)
        if self._watch is not None:
            self._watch.remove()
        if self._constants is not None:
            self._constants.end()
        graph, captured = self.graph, graphs_of(self.parts)
        if graph is not None:
            if graph not in captured:
                self._platform.abort_capture(graph)
            self.graph = None
        for left in reversed(dispatch_modes()[self._depth :]):
            left.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.pool.reset_graphs(captured)
        self.parts.clear()
        self.tasks.clear()
