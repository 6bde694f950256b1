"""Breakable capture: one forward becomes segments of graph with eager parts between them.

1. `record` takes the capture stream, and begins the first segment;
2. the forward runs: its operators are captured, and `CaptureGuard` sees them;
3. at an eager break `run_eagerly` ends the segment, runs the part, and begins the next segment;
   its results reach their readers through fixed places, the `Bridges`;
4. the last segment ends. Whatever fails, nothing of the capture is left.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphrt.core.base import settings, tree
from graphrt.core.base._undo import Undo, undo_after, undoing
from graphrt.core.base.errors import GraphRTError
from graphrt.core.base.option_values import context_of
from graphrt.core.base.thread_mode import outside_modes, set_for_capture, unseen
from graphrt.core.base.torch_names import dispatch_modes
from graphrt.core.batch.context import CaptureTransaction, ForwardContext
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture import guard, refusals
from graphrt.core.capture.constants import Constants, Lifting
from graphrt.core.device.contract import Capability, DeviceGraph, Unexplained
from graphrt.core.replay import entry
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.recording import active, enter_under_way, freeze_garbage
from graphrt.core.replay.tasks import CapturedTask


class Bridges:
    """Fixed buffers for tensors that have another address at every step, such as results of an
    eager part, so that graphs can read them.

    There is one buffer for each tensor of each site (an eager part, or the outputs), as large as
    the largest capture needed. Smaller captures use a part of it, as only one step runs in a pool
    at a time.
    """

    def __init__(self) -> None:
        # (site, number of a tensor in its result) -> the bytes of its buffer.
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}
        # Buffers that a larger capture has replaced.
        self._outgrown: list[torch.Tensor] = []

    def fix(
        self,
        site: int,
        result: Any,
        *,
        stays: Callable[[str, torch.Tensor], bool],
        allocate: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
    ) -> tuple[Any, frozenset[str]]:
        """Copy the tensors of `result` into fixed memory. Returns the result with the copies, and
        the paths of tensors that were not copied: empty ones, and those that `stays(path, tensor)`.

        `allocate` returns memory for a tensor, or None to use a buffer of this object. A tensor
        that is in the result twice has two copies: at another step it may be two tensors.
        """
        unmoved: set[str] = set()
        fixed: list[torch.Tensor] = []
        for path, leaf in tree.leaves(result):
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.numel() == 0 or stays(path, leaf):
                unmoved.add(path)
                fixed.append(leaf)
                continue
            buffer = None if allocate is None else allocate(leaf)
            if buffer is None:
                buffer = self.buffer((site, len(fixed)), leaf)
            buffer.copy_(leaf)
            fixed.append(buffer)
        in_order = iter(fixed)
        return tree.map_leaves(lambda _: next(in_order), result), frozenset(unmoved)

    def buffer(self, key: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
        """A tensor in the buffer of `key` with the shape of `like`; a buffer that is too small is
        replaced. It has the strides of `like` too, unless elements of that share memory.
        """
        shape, strides = like.shape, separate_strides(like)
        last_element = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        needed_bytes = like.element_size() * (1 + last_element) if like.numel() else 0

        def place() -> torch.Tensor:
            flat = self._buffers.get(key)
            if flat is None or flat.numel() < needed_bytes or flat.device != like.device:
                if flat is not None:
                    # Graphs captured with the old buffer still write and read it.
                    self._outgrown.append(flat)
                flat = torch.empty(needed_bytes, dtype=torch.uint8, device=like.device)
                self._buffers[key] = flat
            typed = torch.empty(0, dtype=like.dtype, device=like.device)
            return typed.set_(flat.untyped_storage(), 0, shape, strides)

        # Nothing of this may be recorded, and replays write outside of inference mode too.
        return unseen(place)

    def clear(self) -> None:
        self._buffers.clear()
        self._outgrown.clear()


class OutputBuffer(Bridges):
    """One memory for what several forwards return, such as those of all runners of a model, at all
    sizes: each step overwrites what the step before left in it."""

    def hold(self, outputs: Any) -> Any:
        """At the end of a forward: the outputs, with each tensor copied to its place in the buffer.
        The largest size comes first; a larger one after it gets new memory."""
        return self.fix(0, outputs, stays=lambda path, tensor: False)[0]


def separate_strides(like: torch.Tensor) -> tuple[int, ...]:
    """The strides of `like`, or those of a contiguous tensor if its elements share memory."""
    strides = like.stride()
    if 0 in strides and any(s == 0 and n > 1 for n, s in zip(like.shape, strides, strict=True)):
        return torch.empty(like.shape, dtype=like.dtype, device="meta").stride()
    return strides


R = TypeVar("R")


class Recorder:
    """One capture under way: it drives segments and eager parts, and takes all back if it fails.

    Made for one call of a wrapper: `record` runs it, `parts` is what the entry then replays, and
    `discard` destroys that. `breakable` says whether `@eager_break` functions and the operators in
    `breaks` end the segment. Where it is false they are errors in a PIECEWISE capture, and captured
    in a FULL one.
    """

    def __init__(
        self,
        pool: GraphPool,
        bridges: Bridges,
        context: ForwardContext,
        call: entry.Call,
        *,
        owned: bool,
        breakable: bool,
        breaks: Iterable[str],
        hooks: entry.SegmentHooks | None,
        bake: bool,
        is_watched: bool,
        lifting: Lifting,
    ) -> None:
        """For one `call`, whose arguments are `owned` if they were made for this capture. With
        `bake` the graph may keep values of CPU tensors among them; with `is_watched` the operators
        of eager parts are looked at. `lifting` is the wrapper's, for captures without a runner."""
        self.pool = pool
        self.context = context
        self.breakable = breakable
        # The segments and eager parts that have ended, in their order.
        self.parts: list[entry.Part] = []
        # What the recorder itself is doing, for errors; "" while the forward runs.
        self._phase = ""
        # The open segment's graph, and its tasks so far.
        self._open: tuple[DeviceGraph, list[CapturedTask]] | None = None
        # Leaves the host's context around that segment's memory.
        self._inside = Undo()
        self._bridges = bridges
        self._hooks = hooks
        # id of a tensor -> (the tensor, how entries hold it): a part that is given one tensor twice
        # is given one tensor twice at replays too.
        self._aliases: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        # id of a tensor -> that tensor, whose Python object only the forward has: see `give`.
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}
        tensors = tree.tensors(*call)
        # Tensors outside of the pool: the caller's before the forward, and arguments of an eager
        # part before it. At the end of each segment their shapes and addresses must be the same.
        self._places = _Addresses()
        if not owned:
            self._places.add(tensors)
        # torch's settings around the forward: eager parts may differ from them in autocast alone.
        self._settings: Mapping[str, Any] = {}
        listed = frozenset(breaks if self.must_break else ())
        for name in listed:
            guard.check_break(name)
        transaction = context.capture or CaptureTransaction()
        of_runner = transaction.lifting
        constants, error = Lifting.of(pool, lifting if of_runner is None else of_runner)
        check_host = None
        device_type = pool.platform.device_type
        if device_type != "cpu":
            # Constants that an earlier piece returned may be read.
            unreadable = [t for t in tensors if not bake and not (constants and constants.take(t))]
            may_draw = transaction.may_draw and (of_runner is not None or lifting.is_on)
            check_host = guard.host_check(unreadable, error, may_draw=may_draw)
        rows = refusals.OPERATORS + (refusals.OF_SLEEPING_MEMORY if pool.around_memory else ())
        rules = refusals.rules_for(rows, device_type, context.mode)
        self._guard = guard.CaptureGuard(
            self, context, listed, check_host, constants, pool._owns, rules, is_watched=is_watched
        )
        self.give(tensors if owned else ())

    @property
    def segment_open(self) -> bool:
        """See `Recording.segment_open`."""
        return self._open is not None

    @property
    def must_break(self) -> bool:
        """See `Recording.must_break`."""
        return self.context.mode is GraphMode.PIECEWISE

    def record(self, body: Callable[[], R]) -> R:
        """Capture `body`; returns its result. If it raises, or is interrupted, everything is rolled
        back and the error explained."""
        # A lock in C: no interrupt comes between taking it and the body, nor before its release.
        with self.pool.capture_lock:
            try:
                return self._record(body)
            except Exception as error:
                graph = f"{self.context.mode.name} [{self.context.descriptor}]"
                name = partial(refusals.note_place, graph=graph, phase=self._phase)
                if isinstance(error, GraphRTError):
                    name(error)
                    raise  # what is named already needs no explanation
                if refusals.makes_graphs(error):
                    raise name(refusals.OWN_GRAPHS()) from error
                explained = self.pool.platform.explain(error)
                if isinstance(explained, Unexplained):
                    name(error)
                    raise
                # No local name of it: its traceback has this frame, and would keep the memory of
                # the capture alive until a collection.
                raise name(explained.at(refusals.source_of(error))) from error

    @undoing
    def _record(self, undo: Undo, body: Callable[[], R]) -> R:
        pool, platform, context = self.pool, self.pool.platform, self.context
        depth = len(dispatch_modes())
        undo.enter(pool.on_device())
        set_for_capture(undo)
        enter_under_way(undo, self)
        undo.set(active, self)
        undo.later(partial(setattr, self._guard, "recorder", None))  # each knows the other
        # A garbage collection may destroy other graphs, which no device allows during a capture.
        freeze_garbage(undo, self)
        pool.check_open()
        pool._enter_capture(context)
        # The capture stream waits for all earlier work in the pool. Undone, the caller's stream
        # waits for the capture; it counts as the last that used the pool, so others wait for it.
        pool.streams.follow()
        work = None if context.capture is None else context.capture.work
        undo.enter(platform.on_stream(platform.capture_stream(pool.stream, work)))
        pool._expire_outputs()
        undo.after_error(partial(self.discard, depth))
        self._settings = settings.around_part() if self.breakable else {}
        self._begin()
        result = body()
        self._end(is_last=True)
        if self._guard.constants is not None:
            self._guard.constants.hand_on(result)
        return result

    def run_eagerly(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        stub: Callable[..., Any] | None = None,
    ) -> Any:
        """End the segment, run `function`, or `stub` for it, begin the next segment. Returns its
        results, with tensors that segments can read at every replay."""
        guard.refuse_transform(function)
        self._end()
        if self.pool.after_segment is not None:
            self.pool.after_segment()
        name, call = entry.name_of(function), (args, kwargs)
        tensors = tree.tensors(*call)
        self.check_read(tensors, f"eager break {name} is given")
        places = _Addresses()
        places.add(tensors)
        # Replays call it with the tensors of the capture.
        kept_call = tree.map_leaves(self.captured_ref, call)
        outside_pool = set(map(id, tree.tensors(*kept_call)))
        at_replay = entry.under_settings(
            entry.on_copies(function) if can_change(args, kwargs) else function, self._settings
        )
        addresses = {t.untyped_storage().data_ptr() for t in tensors if t.layout is torch.strided}
        result = self._guard.doors.watched(stub or function, args, kwargs, self._guard)
        places.check()
        self._places.add([tensor for tensor in tensors if id(tensor) in outside_pool])
        strided(result, f"eager break {name}")
        readable, aliased, recorded = unseen(partial(self._readable, result, addresses))
        self.give([leaf for path, leaf in tree.leaves(readable) if path not in aliased])
        self.parts.append(entry.EagerPart(at_replay, kept_call, recorded, aliased))
        copies = _copies(result, readable)
        # A storage that is alive below is one that the part has also kept elsewhere, so this
        # reference to it has to go first.
        del result
        for storage, same_memory in copies.items():
            if len(same_memory) > 1 or not storage.expired():  # type: ignore[no-untyped-call]
                self._guard.copies |= dict.fromkeys(map(_memory, same_memory), name)
        self._guard.doors.settle()
        self._begin()
        return readable

    def _readable(self, result: Any, memory: set[int]) -> tuple[Any, frozenset[str], Any]:
        """Copy the results of an eager part to where graphs read them at every replay. Returns the
        results with the copies; the paths of tensors that are not copied, as they are in `memory`
        that the part was given, or in the pool; and the results as the entry keeps them."""

        def stays(path: str, tensor: torch.Tensor) -> bool:
            return tensor.untyped_storage().data_ptr() in memory or self.pool._owns(tensor)

        # Among eager parts alone: a segment may be empty at one size, and then is no part.
        site = len([part for part in self.parts if isinstance(part, entry.EagerPart)])
        allocate = self.pooled_like
        readable, aliased = self._bridges.fix(site, result, stays=stays, allocate=allocate)
        # The forward gets strong references, so it decides how long they live; the entry weak ones.
        return readable, aliased, tree.map_leaves(self._kept_apart, readable)

    def bracketed(self, issue: Callable[[], object]) -> Any:
        """Issue the operators of one task inside of its bracket; returns its handle."""
        assert self._open is not None
        graph, platform = self._open[0], self.pool.platform
        platform.task_begin(graph)
        issue()
        return platform.task_end(graph)

    def add_task(self, task: CapturedTask) -> None:
        """Note a task of the open segment."""
        assert self._open is not None
        self._open[1].append(task)

    @property
    def task_count(self) -> int:
        """How many tasks the open segment has."""
        return len(self._open[1]) if self._open else 0

    def give(self, leaves: Iterable[Any]) -> None:
        """Note tensors of which the forward has the only Python object: see `made`."""
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self._made[id(leaf)] = weakref.ref(leaf)

    def made(self, tensor: torch.Tensor) -> bool:
        """See `Recording.made`."""
        reference = self._made.get(id(tensor))
        return reference is not None and reference() is tensor

    @property
    def constants(self) -> Constants | None:
        """What was made of memory of the host; None where nobody looked."""
        return self._guard.constants

    def forward_returned(self, result: Any) -> None:
        """The forward is over: operators captured from here on are not its own."""
        self.check_read(strided(result), "the forward returns")
        self._guard.issued = None

    def check_read(self, values: Any, what: str) -> None:
        """See `Recording.check_read`."""
        doors = self._guard.doors
        if self.breakable and doors.made:
            doors.check(tree.tensors(values), what)

    def captured_ref(self, tensor: torch.Tensor) -> torch.Tensor:
        """How a captured entry holds a tensor: weakly if it is pool memory, else strongly."""
        noted = self._aliases.get(id(tensor))
        # An eager part may have given it another shape, or other memory.
        if noted and noted[0]() is tensor and tree.identity(noted[1]) == tree.identity(tensor):
            return noted[1]
        # An alias of memory would lose a conjugation that torch has put off.
        if not self.pool._owns(tensor) or tensor.is_conj() or tensor.is_neg():
            return tensor
        # The alias itself must not be recorded, and replays outside of inference mode write it too.
        alias = unseen(partial(self.pool.platform.weak_ref, self.pool.memory, tensor))
        self._aliases[id(tensor)] = weakref.ref(tensor), alias
        return alias

    def _kept_apart(self, tensor: torch.Tensor) -> torch.Tensor:
        """`captured_ref`, but never the forward's own tensor, which may yet become another view."""
        kept = self.captured_ref(tensor)
        return unseen(tensor.detach) if kept is tensor else kept

    def pooled_like(self, like: torch.Tensor) -> torch.Tensor | None:
        """Pool memory with the shape and dtype of `like`; None where there can be none."""
        platform = self.pool.platform
        # The pool lives as long as the entry only if a graph of the entry is captured already.
        keeps_pool = Capability.ALLOCATE_IN_POOL in platform.capabilities and entry.graphs_of(
            self.parts
        )
        if not keeps_pool or like.device.type != platform.device_type:
            return None
        tensor = unseen(partial(self._allocated, like))
        return tensor if self.pool._owns(tensor) else None

    @undoing
    def _allocated(self, undo: Undo, like: torch.Tensor) -> torch.Tensor:
        """A new tensor in the pool, of the shape and dtype of `like`."""
        self._enter_memory(undo)
        undo.enter(self.pool.platform.allocate_in(self.pool.memory))
        strides = separate_strides(like)
        return torch.empty_strided(like.shape, strides, dtype=like.dtype, device=like.device)

    def _enter_memory(self, undo: Undo) -> None:
        """Until `undo`, be in the host's context around memory of graphs."""
        if self.pool.around_memory is not None:
            undo.enter(context_of("around_memory", self.pool.around_memory))

    def _begin(self) -> None:
        """Begin a segment, in a new graph."""
        self._phase = ", as a segment began"
        if self._hooks is not None:
            self._hooks.before_capture()
        platform = self.pool.platform
        # Noted first, so that `discard` finds it whatever interrupts the rest.
        graph = platform.new_graph()
        self._open = graph, []
        try:
            self._enter_memory(self._inside)
            platform.begin_capture(graph, self.pool.memory)
        except BaseException as error:  # at once: the forward may catch it, and go on
            undo_after(error, partial(platform.abort_capture, graph))
            undo_after(error, partial(self._inside.now, failed=True))
            self._open = None
            raise
        self._guard.begin(graph)
        self._phase = ""

    def _end(self, *, is_last: bool = False) -> None:
        """End the open segment, which becomes a part if it has recorded anything."""
        assert self._open is not None
        self._phase = ", as a segment ended"
        (graph, tasks), platform = self._open, self.pool.platform
        self._places.check()
        self._guard.end()
        if self._hooks is not None:
            self._hooks.end_of_capture()
        recorded = platform.end_capture(graph)
        self._inside.now()
        before = [] if self._guard.constants is None else self._guard.constants.checks()
        if self._hooks is not None:
            before.append(self._hooks.before_replay)
        segment = (
            entry.Segment(self.pool.platform, graph, tasks, before) if tasks or before else graph
        )
        if recorded:
            self.parts.append(segment)
            self.pool.graphs[graph] = self.pool.memory
        self._open = None
        if not recorded or platform.capture_executes:
            return
        if self._is_replayed(is_last=is_last):
            # A capturing call has the effect of an eager call, and later parts read its results. As
            # at a step, no dispatch mode of the caller sees the operators of a replay.
            self._phase = ", as a segment was first replayed"
            outside_modes(segment.replay)
        else:
            platform.upload(graph)
        self._phase = ""

    def _is_replayed(self, *, is_last: bool) -> bool:
        """Whether somebody reads, at its capture, what a segment writes."""
        transaction, can_upload = self.context.capture, self.pool.platform.can_upload
        # What cannot be uploaded is prepared by a replay, as if it were not the last.
        if transaction is not None and transaction.replays is not None:
            return transaction.replays(is_last and can_upload)
        # vLLM's custom all-reduce, in any segment, reads addresses that come after all captures.
        return self.pool.holders.uses_results or not can_upload

    def discard(self, depth: int | None = None) -> None:
        """Discard the captured parts and the open segment, and exit the dispatch modes above
        `depth` that a failed forward has not exited. May be called again."""
        self._guard.remove()
        captured = entry.graphs_of(self.parts)
        if self._open is not None:
            if self._open[0] not in captured:
                self.pool.platform.abort_capture(self._open[0])
            self._open = None
        self._inside.now(failed=True)
        for left in () if depth is None else reversed(dispatch_modes()[depth:]):
            left.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.pool._reset_graphs(captured)
        self.parts.clear()


class _Addresses:
    """Shapes and addresses of tensors as they were when they were added, to compare them later."""

    def __init__(self) -> None:
        # id -> the tensor, kept alive.
        self._tensors: dict[int, torch.Tensor] = {}
        # A list for each property (shape, address, ...), a value for each tensor: a segment's end
        # compares whole lists in C. One by one, many parts took the square of their number.
        self._before: dict[Callable[[torch.Tensor], object], list[object]] = defaultdict(list)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.layout is torch.strided and id(tensor) not in self._tensors:
                self._tensors[id(tensor)] = tensor
                for get in tree.PLACEMENT:
                    self._before[get].append(get(tensor))

    def check(self) -> None:
        """Raise `RefusedOpError` for a tensor that has another shape or other memory by now:
        replays would do that to it again, or give an eager part what is there then."""
        for get, before in self._before.items():
            if [*map(get, self._tensors.values())] != before:
                pairs = zip(self._tensors.values(), before, strict=True)
                moved = next(tensor for tensor, was in pairs if get(tensor) != was)
                raise refusals.RESHAPED_ARGUMENT(f"now {refusals.described(moved)}")


def _copies(result: Any, readable: Any) -> dict[StorageWeakRef, list[torch.Tensor]]:
    """The copies of tensors in a result, by the memory that was copied."""
    copies: dict[StorageWeakRef, list[torch.Tensor]] = {}
    for tensor, copy in zip(tree.tensors(result), tree.tensors(readable), strict=True):
        if tensor is not copy:
            copies.setdefault(_memory(tensor), []).append(copy)
    return copies


def _memory(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def strided(result: Any, what: str = "the forward") -> Any:
    """What a forward, or an eager part, returns; raises `OutputError` for a tensor that has no one
    memory."""
    for tensor in tree.tensors(result):
        if tensor.layout is not torch.strided:
            raise refusals.NOT_STRIDED(f"{tensor.layout}, {tensor.dtype}", what=what)
    return result


def can_change(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function called with these arguments gets lists, dicts or dataclasses, whose items
    it may replace: then each replay passes copies. No copy is made of a module."""
    return any(map(_holds_container, (*args, *kwargs.values())))


def _holds_container(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_holds_container, value))
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return isinstance(value, list | dict) or (is_record and not isinstance(value, torch.Tensor))
