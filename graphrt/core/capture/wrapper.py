"""`GraphWrapper`: a callable that is run eagerly, captured or replayed, as the context says."""

from __future__ import annotations

import importlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, cast

import torch

from graphrt.core.base import errors, option_values, tree
from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.log import logger
from graphrt.core.base.torch_names import untraced
from graphrt.core.batch.context import ForwardContext, current_context
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode, graphs_off
from graphrt.core.capture import refusals
from graphrt.core.capture.constants import Lifting
from graphrt.core.capture.limit import GraphLimit, LimitReport
from graphrt.core.capture.options import GraphOptions, Sealing
from graphrt.core.capture.recorder import Bridges, Recorder
from graphrt.core.device.contract import Capability, DeviceGraph
from graphrt.core.device.platform import Platform
from graphrt.core.device.registry import resolve_platform
from graphrt.core.dispatch.dispatcher import GraphDispatcher
from graphrt.core.dispatch.reasons import Reason
from graphrt.core.plan.sizes import CaptureKey, graph_name
from graphrt.core.replay.entry import Entry, SegmentHooks, bound_arguments, graphs_of, name_of
from graphrt.core.replay.pool import GraphPool, in_turn
from graphrt.core.replay.recording import is_inside_capture, under_way

_FULL = GraphMode.FULL
_STATIC = -1
"""The site of static outputs among a wrapper's `Bridges`; those of eager parts are 0, 1, ..."""

_EAGERLY = object()
"""What `_capture` returns for a call that is to run eagerly, after the pool's turn."""


class CallChecks(Protocol):
    """Looks at the calls of a wrapper that would be replayed; see `WrapperTrials`."""

    def before_capture(self, wrapper: GraphWrapper) -> None:
        """A graph is about to be captured."""

    def captured(self, wrapper: GraphWrapper, descriptor: BatchDescriptor) -> None:
        """A graph was captured."""

    def dropped(self, descriptor: BatchDescriptor | None) -> None:
        """The graph of a descriptor is destroyed, or all of them."""

    def may_replay(
        self, wrapper: GraphWrapper, entry: Entry, context: ForwardContext, args: Any, kwargs: Any
    ) -> bool:
        """Whether a call may be replayed; else it runs eagerly."""


class WrapperGraphs:
    """What a wrapper has captured: entries by descriptor and by slot, and buffers between their
    parts.

    A step that finds its entry in `by_slot` replays at once. An entry is there only when its
    arguments need no check any more; other steps look in `entries`. This class is not part of the
    wrapper, because a class with `__getattr__` loads its own attributes slowly.
    """

    def __init__(
        self,
        mode: GraphMode | None,
        pool: GraphPool,
        options: GraphOptions,
        read_context: Callable[[], ForwardContext | None],
        trials: CallChecks | None,
    ) -> None:
        """`mode` None is equal to no context's mode: then all calls run eagerly."""
        self.trials = trials
        self.entries: dict[BatchDescriptor, Entry] = {}
        # The dispatcher's slot, or that of a kept context -> an entry that may be replayed at once.
        self.by_slot: dict[int, Entry] = {}
        # Where results of eager parts, and static outputs, are copied for graphs to read.
        self.bridges = Bridges()
        # Whether arguments are compared at an entry's first replay, and at every one.
        self.checks = options.checks("capture")
        self.always_checks = trials is not None or options.checks("sample")
        # Whether results are cloned after each replay.
        self.clones = options.outputs == "clone"
        # Whether each replay returns new lists and dicts, which the host may change.
        self.fresh_containers = True
        self.mode = mode
        self.read_context = read_context
        self.pool = pool

    def replay(self, entry: Entry, context: ForwardContext) -> Any:
        """Replay an entry in the turn of `context`; returns its outputs. If the step waits for its
        updates, it keeps the pool."""
        pool = self.pool
        is_full = self.mode is _FULL
        # A FULL replay is a whole step. A piece begins one unless its step has replayed already.
        if is_full:
            if pool.pieces.replaying is not None:
                pool._leave_step(context)
            pool.generation += 1
            if pool.handed_out:
                pool._expire_outputs()
        elif pool.pieces.replaying is not context.token or context.token is None:
            pool._enter_step(context)
        streams = pool.streams
        if streams.read_id is not None:
            stream_id = streams.read_id()
            if stream_id != streams.last_id:
                streams.change(stream_id)
        if entry.graph is not None:
            entry.graph.replay()
        else:
            entry.launch(context, pool, all_tasks=is_full)
        if self.clones:
            return tree.cloned(entry.outputs)
        if entry.fresh is not None and self.fresh_containers:
            return entry.fresh()
        return entry.outputs

    def find_at(self, slot: int, entry: Entry) -> None:
        """Let steps of this slot find `entry` at once, if no check is due; -1 is no slot."""
        if slot >= 0 and not entry.compares_next:
            self.by_slot[slot] = entry

    def take(self, descriptor: BatchDescriptor | None, *, again: bool) -> Sequence[DeviceGraph]:
        """Remove the entry of one descriptor, or all entries; returns their graphs. Dispatchers
        stop serving them. Where the wrapper captures `again` by itself, at the next step that is
        announced, those that only announce steps go on."""
        option_values.check_hashable("descriptor", descriptor)
        keys = list(self.entries) if descriptor is None else [descriptor]
        taken = [self.entries[key] for key in keys if key in self.entries]
        # First: after an interrupt behind it no batch is dispatched to what is half gone.
        for entry in taken:
            for dispatcher in {entry.owner, *(() if again else entry.announcers)} - {None}:
                dispatcher.withdraw(self.mode, entry.descriptor)
        self.by_slot.clear()
        for entry in taken:
            # A runner's step that still has the entry sees that there is nothing to replay.
            entry.graph = None
            self.entries.pop(entry.descriptor, None)
        return graphs_of([part for entry in taken for part in entry.parts])

    def clear_buffers(self) -> None:
        """Let go of the buffers if no graph is left: they may be in the pool, and keep its
        memory."""
        if not self.entries:
            self.bridges.clear()


class CountedGraphs(WrapperGraphs):
    """As `WrapperGraphs`, under a limit: each replay is noted in `asked`."""

    asked: deque[CaptureKey]

    def replay(self, entry: Entry, context: ForwardContext) -> Any:
        self.asked.append((context.mode, entry.descriptor))
        self.pool.pieces.counted = context.token
        return super().replay(entry, context)


class GraphWrapper(errors.Uncopied):
    """Wraps `runnable` so that steps of `runtime_mode` capture and replay it.

    1. Without a context, under mode NONE or under another mode than its own it calls the runnable:
       that is what lets a FULL wrapper stand around a model whose pieces are PIECEWISE wrappers.
    2. It takes the pool's turn, and looks for the graph of the context's descriptor.
    3. With a graph it replays. Without one it captures where that is allowed, and else runs
       eagerly, which it counts.

    It writes no input and pads nothing: tensors are where the capture found them. Attributes that
    the wrapper lacks are the runnable's.
    """

    platform_name: str | None = None
    """The platform a subclass belongs to; None is the current one."""
    platform_class: type = Platform
    """That of the pools it takes."""
    entry_class: type[Entry] = Entry
    """What a capture makes."""

    def __init__(
        self,
        runnable: Callable[..., Any],
        runtime_mode: GraphMode | str,
        *,
        pool: GraphPool | None = None,
        read_context: Callable[[], ForwardContext | None] = current_context,
        options: GraphOptions | None = None,
        breakable: bool = False,
        hooks: SegmentHooks | None = None,
        trials: CallChecks | None = None,
    ) -> None:
        """`read_context` is called with no arguments and returns this step's `ForwardContext`, or
        None; a host with a context of its own builds one from it, once for each of its steps.
        A `breakable` PIECEWISE wrapper ends segments at `@eager_break` functions and at the
        operators in `options.breaks`, which are `RefusedOpError` in one that is not. `hooks` are
        called around each of its graphs. `trials`, a `WrapperTrials` of its own, find what the host
        changes in Python. Raises `InvalidModeError` unless the mode is PIECEWISE or
        FULL, and `InvalidOptionError`.
        """
        option_values.check_callable("runnable", runnable)
        option_values.check_kind("hooks", hooks, SegmentHooks)
        option_values.check_takes("read_context", read_context, "read_context()")
        option_values.check_kind("pool", pool, GraphPool)
        option_values.check_kind("options", options, GraphOptions)
        option_values.flag("breakable", breakable)
        self.runnable = runnable
        self.runtime_mode = GraphMode.parse(runtime_mode)
        if self.runtime_mode not in (GraphMode.FULL, GraphMode.PIECEWISE):
            raise errors.InvalidModeError(
                "a wrapper cannot have this mode",
                got=self.runtime_mode.name,
                expected="FULL or PIECEWISE",
                advice="nest a FULL wrapper around PIECEWISE ones for FULL_AND_PIECEWISE",
            )
        self.pool = GraphPool(self.platform_name) if pool is None else pool
        if not isinstance(self.pool.platform, self.platform_class):
            raise option_values.refused(
                f"{type(self).__name__} cannot use a pool of another platform",
                self.pool.platform.name,
                self.platform_class.__name__,
                f"pool=GraphPool({self.platform_name!r}), or GraphWrapper for any pool",
            )
        self.options = options or GraphOptions()
        mode = None if graphs_off() else self.runtime_mode
        self._graphs = WrapperGraphs(mode, self.pool, self.options, read_context, trials)
        self._limit = GraphLimit.of(self.options, self.pool)
        if self._limit is not None:
            if not self.options.lazy:
                raise errors.InvalidOptionError(
                    "max_graphs and graph_bytes limit only wrappers that capture lazily",
                    got="max_graphs or graph_bytes, and lazy=False",
                    advice="GraphOptions(lazy=True, max_graphs=...)",
                )
            self._count_in(self._limit)
        breakable = breakable and self.runtime_mode is GraphMode.PIECEWISE
        # Whether a failed capture may be repeated: not if parts that have ended were run.
        device = self.pool.platform
        self._may_repeat = (
            Capability.FREE_FAILURES in device.capabilities
            and device.device_type != "cpu"
            and not breakable
        )
        # Without a runner no warm-up is watched: the first capture looks at each operator for
        # memory of the host, later sizes only if it found some.
        self._lifting = Lifting(is_on=True)
        # Makes the recorder of one capture.
        self._new_recorder = partial(
            Recorder,
            breakable=breakable,
            breaks=self.options.breaks,
            hooks=hooks,
            bake=self.options.host_arguments == "bake",
            is_watched=self.options.checks("capture"),
        )
        # Why calls ran eagerly -> how many.
        self._eager_calls = Counter[Reason]()
        # How often earlier pieces of a size replayed though this one had no graph.
        self._unfinished = Counter[BatchDescriptor]()
        self._sealing = Sealing(self.options)
        # Whether a runner owns the arguments of its calls: see `serve_owner`.
        self._owner_served = False
        # Last: a capture session that is under way includes the wrapper from here on.
        self.pool.holders.add(self)

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run, capture or replay the runnable, as the context says; returns what it returns.

        Tensor arguments must be where the capture found them. Raises `PoolBusyError`, what is a
        `CaptureError` (two only if `strict`), `StaleInputError` and what updates of tasks raise.
        """
        graphs = self._graphs
        context = graphs.read_context()
        if context is None:
            self._eager_calls[Reason.NO_CONTEXT] += 1
            return self.runnable(*args, **kwargs)
        if context.mode is not graphs.mode or (under_way and is_inside_capture()):
            return self.runnable(*args, **kwargs)
        # `in_turn`, repeated inline: every step goes through here.
        pool = graphs.pool
        outer = pool.owner
        if outer is not None and outer is not context:
            raise pool.busy_error(context)
        try:
            pool.owner = context
            entry = graphs.by_slot.get(context.slot)
            # Nothing at this slot, another dispatcher's slot, or an earlier piece ran eagerly.
            if (
                entry is None
                or entry.descriptor is not context.descriptor
                or context.token is pool.pieces.without_graph
            ):
                entry = self._find(context, args, kwargs)
            if entry is not None:
                outputs = graphs.replay(entry, context)
                # Not in a `finally`, which an interrupt could end before this line: here `except`
                # gives the pool back then. A step that waits for its updates keeps it.
                if pool.owner is context:
                    pool.owner = outer
                return outputs
            outputs = self._capture(context, args, kwargs)
            pool.owner = outer
        except BaseException:  # `@undoing`, repeated inline
            if pool.owner is context:
                pool.owner = outer
            else:  # nobody has the outputs of a step that waits for its updates
                pool.end_waiting(pool.owner)
            raise
        # After the turn: code of the host may step and capture in the pool itself.
        if outputs is _EAGERLY:
            return self.runnable(*args, **kwargs)
        self._tell_pool(context)
        return outputs

    def _find(self, context: ForwardContext, args: Any, kwargs: Any) -> Entry | None:
        """The entry to replay for a step that finds none in `by_slot`, with its arguments compared
        if that is due; None if there is none."""
        graphs, descriptor = self._graphs, context.descriptor
        if descriptor is None:
            return None
        if self.pool.pieces.unfinished is not None:
            self._take_back_unfinished(context)
        if type(descriptor) is not BatchDescriptor:
            option_values.check_kind(
                "descriptor", descriptor, BatchDescriptor, example="BatchDescriptor(4)"
            )
        entry = graphs.entries.get(descriptor)
        if entry is None:
            return None
        in_its_capture = context.token is not None and entry.captured_in is context.token
        if in_its_capture or context.capture is not None:
            raise errors.CaptureError(
                "a wrapper was called twice for one descriptor, in the step that captures it or to "
                "capture it again",
                got=descriptor,
                expected="one call for each descriptor",
                advice="give every call site its own wrapper; or call clear_graphs() or "
                "drop(descriptor) before capturing again",
            )
        pieces = self.pool.pieces
        if context.token is pieces.without_graph:
            return None
        # A context without a token does not tell whether an earlier piece of the step ran eagerly:
        # arguments are compared at every replay.
        has_no_token = context.token is None and graphs.mode is not _FULL
        if entry.compares_next or has_no_token:
            entry.check_arguments(args, kwargs, name_of(self.runnable))
            entry.compares_next = graphs.always_checks
        trials = graphs.trials
        if trials is not None and not trials.may_replay(self, entry, context, args, kwargs):
            self._miss(context)
            return None
        if context.announced and isinstance(context.dispatcher, GraphDispatcher):
            entry.announcers.add(context.dispatcher)
        if not has_no_token:
            graphs.find_at(context.slot, entry)
        return entry

    def _miss(self, context: ForwardContext) -> None:
        """Note that a piece runs eagerly: its results are not where later pieces of the step read
        them, so none of these is replayed."""
        is_piece = context.mode is not _FULL or self._limit is not None
        if is_piece and context.token is not None:
            self.pool.pieces.without_graph = context.token

    def _follows(self, context: ForwardContext, arguments: Any) -> bool:
        """Whether a lazy wrapper captures its call. It does what the wrappers before it in this
        step did: it captures behind a capture, and not behind a replay or an eager call."""
        limit, pieces, token = self._limit, self.pool.pieces, context.token
        most = None if limit is None else limit.most
        key = context.mode, cast(BatchDescriptor, context.descriptor)
        is_behind = pieces.is_behind_replay(token)
        if is_behind or (limit is None and token is not None and pieces.holds(arguments)):
            if limit is None and self.pool.holders.in_session:
                return True  # which raises: after the session nothing would be captured
            # The step that captured the earlier pieces was aborted before this one, or only some
            # steps have this one. All are captured again at its 1st, 2nd, 4th, 8th miss: at every
            # miss, a piece that every second step has would have each step captured.
            self._unfinished[key[1]] = times = self._unfinished[key[1]] + 1
            if times & (times - 1) == 0:
                pieces.unfinished = *key, most
                for holder in self.pool.holders:
                    if isinstance(holder, GraphWrapper):
                        holder._graphs.by_slot.clear()  # so that the next step looks in `_find`
            if self.options.strict or not is_behind:
                return True  # which raises: it may not run eagerly, or is a step of its own
        return pieces.follows(token, most, limit is None or limit.admits(key))

    def _take_back_unfinished(self, context: ForwardContext) -> None:
        """Destroy the graphs that `_follows` has noted, once nobody reads their results any more:
        they are captured again with the piece that had none."""
        pieces = self.pool.pieces
        if pieces.unfinished is None or not pieces.is_new(context.token):
            return
        (mode, descriptor, most), pieces.unfinished = pieces.unfinished, None
        for holder in self.pool.holders:
            if isinstance(holder, GraphWrapper) and holder._sealing.may_capture:
                limit = holder._limit and holder._limit.most
                if (limit, holder.runtime_mode) == (most, mode) and descriptor in holder.entries:
                    logger.info(
                        "%s is captured again, as a piece had no graph behind others that had",
                        graph_name((mode, descriptor)),
                    )
                    holder._destroy_steps(descriptor)

    def _capture(self, context: ForwardContext, args: Any, kwargs: Any) -> Any:
        """Capture a call, if allowed, and return its result; else `_EAGERLY`, which is counted."""
        graphs, transaction = self._graphs, context.capture
        if context.descriptor in graphs.entries:
            # An earlier piece of the step ran eagerly: its results are not where this graph reads.
            self._eager_calls[Reason.MISSING_GRAPH] += 1
            return _EAGERLY
        allowed = transaction is not None or self._sealing.may_capture
        limit = None if transaction is not None else self._limit
        if allowed and transaction is None and context.descriptor is not None:
            allowed = self._follows(context, (args, kwargs))
        if context.descriptor is None or not allowed:
            self._eager_calls[self._sealing.miss(context, graphs.entries)] += 1
            self._miss(context)
            return _EAGERLY
        if graphs.trials is not None:
            graphs.trials.before_capture(self)
        record = partial(self._record, context, args, kwargs)
        if limit is None:
            entry, result = record()
        else:
            key = context.mode, context.descriptor
            entry, result = limit.capture(
                key, record, lambda key: self._destroy_steps(key[1]), warns=True
            )
            if context.descriptor not in graphs.entries:  # it took too much
                self._miss(context)
                return result
            self.pool.pieces.admitted = context.token, limit.most
        entry.compares_next = graphs.checks
        if graphs.trials is not None:
            graphs.trials.captured(self, entry.descriptor)
        # An entry captured lazily gets its slot at its next step: see `_find`.
        graphs.find_at(-1 if transaction is None else transaction.slot, entry)
        return tree.cloned(result) if graphs.clones else result

    @undoing
    def _record(
        self, undo: Undo, context: ForwardContext, args: Any, kwargs: Any
    ) -> tuple[Entry, Any]:
        """Capture a call; returns its entry, which is among `entries` then, and its result. If that
        raises, pieces that the same step captured before are destroyed too, unless there is a
        transaction, which does so."""
        pool, graphs, lifting = self.pool, self._graphs, self._lifting
        descriptor, transaction = context.descriptor, context.capture
        assert descriptor is not None
        bound = bound_arguments(args, kwargs)
        has_runner = transaction is not None and transaction.lifting is not None
        new_recorder: Callable[[], Recorder] = partial(
            self._new_recorder,
            pool,
            graphs.bridges,
            context,
            (args, kwargs),
            owned=self._owner_served,
            lifting=lifting,
        )
        recorder = new_recorder()

        def take_back() -> None:
            if descriptor not in graphs.entries:
                recorder.discard()
            graphs.clear_buffers()
            if transaction is None:
                self._destroy_captured_in([context.token])
                self._miss(context)

        def run() -> Any:
            drawn = None if lifting.is_on else torch.random.get_rng_state()
            result = self.runnable(*args, **kwargs)
            if drawn is not None and not torch.equal(drawn, torch.random.get_rng_state()):
                raise refusals.HOST_DRAW()
            recorder.forward_returned(result)
            if self.options.outputs != "static":
                return result
            return graphs.bridges.fix(_STATIC, result, stays=lambda path, tensor: False)[0]

        undo.after_error(take_back)
        pool.pieces.check_held((args, kwargs), context)
        try:
            result = recorder.record(run)
        except (errors.PageableCopyError, errors.RefusedOpError):
            # This size copies from the host, or draws there, and the first one did not. Capture it
            # once more, looking at each operator.
            if has_runner or not lifting.repeat():
                raise
            recorder = new_recorder()
            result = recorder.record(run)
        if not has_runner and lifting.is_on and self._may_repeat:
            lifting.told(recorder.constants)
        outputs = tree.map_leaves(recorder.captured_ref, result)
        entry = self.entry_class(descriptor, tuple(recorder.parts), outputs, bound, context.token)
        if self.options.outputs != "static":
            pairs = zip(tree.tensors(outputs), tree.tensors(result), strict=True)
            pool.pieces.hold_loosely(kept for kept, tensor in pairs if kept is not tensor)
        if transaction is not None:
            entry.owner = transaction.dispatcher
            transaction.add(self, partial(self.destroy_graphs, descriptor))
        # From this one store on it is captured: an interrupt before it undoes everything.
        graphs.entries[descriptor] = entry
        return entry, result

    def _tell_pool(self, context: ForwardContext) -> None:
        """Count a capture in the pool, unless the maker of the transaction does."""
        if context.capture is None or context.capture.tells_pool:
            assert context.descriptor is not None
            self.pool._captured(self, context.descriptor)

    def __getattr__(self, name: str) -> Any:
        if name == "runnable":
            raise AttributeError(name)
        return getattr(self.runnable, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.runtime_mode.name}, {len(self.entries)} graphs)"

    @property
    def entries(self) -> Mapping[BatchDescriptor, Entry]:
        """What is captured, by descriptor; a read-only view."""
        return MappingProxyType(self._graphs.entries)

    @property
    def limit_report(self) -> LimitReport | None:
        """What the graphs hold under `max_graphs` or `graph_bytes`; None without a limit."""
        return None if self._limit is None else self._limit.report()

    @property
    def sealed(self) -> bool:
        """Whether nothing is captured any more."""
        return self._sealing.closed

    @property
    def eager_calls(self) -> dict[Reason, int]:
        """How many calls ran eagerly: without a context, without a graph after `seal()`, or though
        their context announced a graph."""
        counted = Reason.MISSING_GRAPH, Reason.NO_CONTEXT, Reason.SEALED
        return {reason: self._eager_calls[reason] for reason in counted}

    def unwrap(self) -> Callable[..., Any]:
        """The callable inside all wrappers."""
        inner = self.runnable
        return inner.unwrap() if isinstance(inner, GraphWrapper) else inner

    def serve_owner(self) -> None:
        """Work for a runner: it owns the arguments, at fixed addresses, so none is compared; and it
        hands out the outputs, so replays return the entry's own. A capture gets arguments made
        for it."""
        self._owner_served = True
        graphs = self._graphs
        graphs.fresh_containers = graphs.checks = graphs.always_checks = False

    def _count_in(self, limit: GraphLimit) -> None:
        """Tell `limit` each replay."""
        graphs: Any = self._graphs
        # Another class, so that replays without a limit are not asked whether they have one.
        graphs.__class__, graphs.asked = CountedGraphs, limit.asked

    @undoing
    def _destroy_steps(self, undo: Undo, descriptor: BatchDescriptor | None) -> None:
        """Destroy a graph, or all, and the graphs of other wrappers that were captured in the same
        step. They read its results where it left them; captured alone later, it would leave them
        elsewhere."""
        entries = self._graphs.entries
        going = entries.values() if descriptor is None else filter(None, [entries.get(descriptor)])
        undo.later(partial(self._destroy_captured_in, [entry.captured_in for entry in going]))
        self.destroy_graphs(descriptor)

    def _destroy_captured_in(self, tokens: Sequence[object]) -> None:
        """Destroy all graphs of the pool that were captured in one of these steps. Each step has a
        token of its own."""
        for holder in self.pool.holders:
            for descriptor, entry in list(holder.entries.items()):
                # A holder that the host wrote may keep other objects than `Entry`.
                captured_in = getattr(entry, "captured_in", None)
                if captured_in is not None and any(captured_in is token for token in tokens):
                    holder.destroy_graphs(descriptor)

    def seal(self) -> None:
        """Capture nothing any more: an unseen descriptor runs eagerly, counted, or raises."""
        self._sealing.close()

    def unseal(self) -> None:
        """Allow capturing again."""
        self._sealing.open()

    def in_session(self, begun: bool) -> None:
        """See `GraphPool.capture_session`."""
        self._sealing.in_session(begun)

    def move_to(self, pool: GraphPool) -> None:
        """Capture in another pool of the same device from now on; the old one forgets the wrapper,
        and a session in it has ended for it.

        Raises `PoolError` while it has graphs, `PoolBusyError` while a step is under way
        in its pool, and `InvalidOptionError` for a pool of another platform or device.
        """
        if pool is not self.pool:
            in_turn(self.pool, "move_to()", partial(self._move_to, pool))

    def _move_to(self, pool: GraphPool) -> None:
        option_values.check_kind("pool", pool, GraphPool, optional=False)
        pool.check_open()
        pool.check_is_of(self.pool.platform, self.pool.device)
        if self.entries:
            raise errors.PoolError(
                "a wrapper cannot be moved to another pool: its graphs lie in this one",
                got=", ".join(map(str, self.entries)),
                expected="no graphs",
                advice="call clear_graphs() before; what is captured next lies in the new pool",
            )
        self.pool.holders.remove(self)
        self._graphs.pool = self.pool = pool
        if self._limit is not None:
            self._limit.pool = pool
        pool.holders.add(self)

    def clear_graphs(self) -> None:
        """Destroy every graph; the wrapper can capture again. Graphs of other wrappers that were
        captured in the same steps go too.

        Raises `PoolBusyError` while a step is under way in the pool.
        """
        in_turn(self.pool, "clear_graphs()", partial(self._destroy_steps, None))

    def drop(self, descriptor: BatchDescriptor) -> None:
        """Destroy the graph of one descriptor, if there is one, and those of other wrappers that
        were captured in the same step. Raises `PoolBusyError` while a step is under way in the
        pool."""
        option_values.check_kind(
            "descriptor", descriptor, BatchDescriptor, optional=False, example="BatchDescriptor(4)"
        )
        in_turn(self.pool, "drop()", partial(self._destroy_steps, descriptor))

    def destroy_graphs(self, descriptor: BatchDescriptor | None) -> None:
        """`drop`, by a caller that has the pool's turn; None destroys all graphs."""
        graphs = self._graphs
        if descriptor is None:
            self._sealing.open()
        self.pool._reset_graphs(graphs.take(descriptor, again=self._sealing.may_capture))
        if graphs.trials is not None:
            graphs.trials.dropped(descriptor)
        graphs.clear_buffers()


def wrapper_class(platform: Platform | str | None) -> type[GraphWrapper]:
    """The class behind `get_static_graph_wrapper_cls()` of a platform, by itself or its name, or of
    the current one.

    Raises `PlatformError` where that path cannot be imported, or leads to no wrapper of this
    platform, and `PlatformError` for a platform of another version of the device contract.
    """
    platform = resolve_platform(platform, must_be_available=False)
    path = platform.get_static_graph_wrapper_cls()
    module, _, name = path.rpartition(".")
    wrapper: Any = None
    cause = None
    try:
        wrapper = getattr(importlib.import_module(module), name)
        # Without a pool it would make one on the platform that it names.
        if issubclass(wrapper, GraphWrapper) and wrapper.platform_name == platform.name:
            return cast(type[GraphWrapper], wrapper)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        cause = error
    raise errors.PlatformError(
        f"{path}, the wrapper class of platform {platform.name!r}, cannot be imported, belongs to "
        "another one, or is no wrapper",
        got=cause or f"{wrapper}, platform_name = {getattr(wrapper, 'platform_name', None)!r}",
        expected=f"a GraphWrapper subclass with platform_name = {platform.name!r}",
        advice="give the platform a subclass of its own that says so, and return its dotted path "
        "from get_static_graph_wrapper_cls()",
    ) from cause
