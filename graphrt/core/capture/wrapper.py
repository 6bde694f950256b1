"""`GraphWrapper`: a callable that is run eagerly, captured or replayed, as the context says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from graphrt.core.base import (
    InvalidModeError,
    StaleInputError,
    Uncopied,
    check_callable,
    check_kind,
    check_takes,
    cloned,
    flag,
    tree,
    without_gradients,
)
from graphrt.core.batch import (
    BatchDescriptor,
    ForwardContext,
    GraphMode,
    current_context,
    graphs_off,
)
from graphrt.core.capture._captured import capture_entry, captured_already, no_slot
from graphrt.core.capture._hot import Hot
from graphrt.core.capture._kept import Kept
from graphrt.core.capture._leaves import strided
from graphrt.core.capture.options import GraphOptions
from graphrt.core.capture.recorder import Capture
from graphrt.core.capture.refusals import Given
from graphrt.core.capture.sealing import Sealing
from graphrt.core.device import Capability
from graphrt.core.dispatch import Reason
from graphrt.core.replay import (
    Entry,
    GraphPool,
    SegmentHooks,
    Updates,
    check_arguments,
    check_hooks,
    in_turn,
    is_inside_capture,
    under_way,
    waiting_step,
)


class GraphWrapper(Uncopied):
    """Wraps `runnable` so that steps of `runtime_mode` capture and replay it.

    Without a context, under mode NONE or under another mode than its own it calls the runnable:
    that is what lets a FULL wrapper stand around a model whose pieces are PIECEWISE wrappers.
    Attributes that the wrapper lacks are the runnable's.
    """

    platform_name: str | None = None
    """The platform a subclass belongs to; None is the current one."""

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
    ) -> None:
        """`read_context` is called with no arguments and returns this step's `ForwardContext`, or
        None; a host with a context of its own builds one from it, once for each of its steps.
        A `breakable` PIECEWISE wrapper ends segments at `@eager_break` functions and at the
        operators in `options.breaks`, which are `MissedBreakError` in one that is not. `hooks` are
        called around each of its graphs. Raises `InvalidModeError` unless the mode is PIECEWISE or
        FULL, and `InvalidOptionError`.
        """
        check_callable("runnable", runnable)
        check_hooks("hooks", hooks)
        check_takes("read_context", read_context, "read_context()")
        check_kind("pool", pool, GraphPool)
        check_kind("options", options, GraphOptions)
        flag("breakable", breakable)
        self.runnable = runnable
        self.runtime_mode = GraphMode.parse(runtime_mode)
        if self.runtime_mode not in (GraphMode.FULL, GraphMode.PIECEWISE):
            raise InvalidModeError(
                "a wrapper captures in one runtime mode",
                got=self.runtime_mode.name,
                expected="FULL or PIECEWISE",
                advice="nest a FULL wrapper around PIECEWISE ones for FULL_AND_PIECEWISE",
            )
        self.pool = GraphPool(self.platform_name) if pool is None else pool
        self.options = options or GraphOptions()
        self._breakable = breakable and self.runtime_mode is GraphMode.PIECEWISE
        self._segment_hooks = hooks
        if self.options.share_executables:
            self.pool.platform.require(Capability.EXEC_DEDUP, "share_executables")
        self.calls_without_context = self.calls_without_graph = 0
        self.eager_calls_after_seal = self.failed_updates = 0
        self.last_failed_update: str | None = None
        self._hot = Hot(self.runtime_mode, self.pool, self.options, read_context)
        self._kept = Kept(self._hot)
        self._sealing = Sealing(self.options)
        self._off = graphs_off()
        self._owner_served = False
        # Last: a session that is under way has it capture from now on.
        self.pool.add_holder(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run, capture or replay the runnable, as the context says; returns what it returns.

        Tensor arguments must be where the capture found them. Raises `PoolBusyError`, what is a
        `CaptureError` (two only if `strict`), `StaleInputError` and what updates of tasks raise.
        """
        hot = self._hot
        context = hot.read_context()
        if context is None:
            self.calls_without_context += 1
            return self.runnable(*args, **kwargs)
        if context.mode is not hot.mode or (under_way and is_inside_capture()):
            return self.runnable(*args, **kwargs)
        # A turn of the context, written out: see `Turn`.
        pool = hot.pool
        outer = pool.owner
        if outer is not None and outer is not context:
            raise pool.busy_error(context)
        captured = False
        try:
            pool.owner = context
            try:
                entry = hot.by_slot[context.slot]
            except IndexError:
                entry = None
            except TypeError:
                raise no_slot(context.slot) from None
            if entry is None or entry.descriptor is not context.descriptor:
                entry = self._entry_or_none(context)
            if entry is None:
                captured = self._may_capture(context)
                if captured:
                    outputs = self._capture(context, args, kwargs)
            elif entry.unchecked and self._is_behind_a_miss(entry, context, args, kwargs):
                entry = None
            if entry is not None:
                if hot.one_call_a_step:
                    if pool.step is not None:
                        pool.leave_step(context)
                    pool.generation += 1
                    if pool.handed_out:
                        pool.expire_outputs()
                elif pool.step is not context.token or context.token is None:
                    pool.enter_step(context)
                if hot.read_stream_id is not None:
                    stream_id = hot.read_stream_id()
                    if stream_id != pool.stream_id:
                        pool.change_stream(stream_id)
                graph = entry.graph
                if graph is None:
                    try:
                        entry.launch(context, all_tasks=hot.one_call_a_step)
                        outer = entry.deferred or outer
                    except Exception as error:
                        outputs = self._repeat_eagerly(entry, context, error, args, kwargs)
                        pool.owner = outer
                        return outputs
                else:
                    graph.replay()
                outputs = entry.outputs
                if hot.clones:
                    outputs = cloned(outputs)
                elif entry.fresh is not None and hot.fresh_containers:
                    outputs = entry.fresh()
                # Inside of `try`, and no `finally`: an interrupt on the way out must not keep it.
                pool.owner = outer
                return outputs
            pool.owner = outer
        except BaseException:
            pool.owner = outer
            raise
        # Out of the turn: what the host calls there may step and capture in the pool itself.
        if captured:
            self._tell_pool(context)
            return outputs
        return self.runnable(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "runnable":
            raise AttributeError(name)
        return getattr(self.runnable, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.runtime_mode.name}, {len(self._kept.entries)} graphs)"

    @property
    def entries(self) -> Mapping[BatchDescriptor, Entry]:
        """What is captured, by descriptor; a read-only view."""
        return MappingProxyType(self._kept.entries)

    @property
    def sealed(self) -> bool:
        """Whether nothing is captured any more."""
        return self._sealing.closed

    @property
    def eager_calls(self) -> dict[Reason, int]:
        """How many calls ran eagerly though a context was missing, a graph was, or failed."""
        return {
            Reason.MISSING_GRAPH: self.calls_without_graph,
            Reason.NO_CONTEXT: self.calls_without_context,
            Reason.SEALED: self.eager_calls_after_seal,
            Reason.UPDATE_FAILED: self.failed_updates,
        }

    def unwrap(self) -> Callable[..., Any]:
        """The callable inside all wrappers."""
        inner = self.runnable
        return inner.unwrap() if isinstance(inner, GraphWrapper) else inner

    def serve_owner(self) -> None:
        """Work for a caller that owns the arguments, which stay where they are, and that keeps the
        outputs in: replays return the entry's themselves. A capture gets arguments made for it."""
        self._owner_served = True
        self._hot.fresh_containers = self._hot.checks = self._hot.always_checks = False

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

        Raises `GraphsCapturedError` while it has graphs, `PoolBusyError` while a step is under way
        in its pool, and `InvalidOptionError` for a pool of another platform or device.
        """
        if pool is not self.pool:
            in_turn(self.pool, "move_to()", functools.partial(self._move_to, pool))

    def _move_to(self, pool: GraphPool) -> None:
        self._kept.check_move(self.pool, pool)
        self.pool.remove_holder(self)
        self._hot.use(pool)
        self.pool = pool
        pool.add_holder(self)

    def clear_graphs(self) -> None:
        """Destroy every graph; the wrapper can capture again.

        Raises `PoolBusyError` while a step is under way in the pool.
        """
        in_turn(self.pool, "clear_graphs()", functools.partial(self.destroy_graphs, None))

    def update(self, updates: Updates) -> None:
        """The updates of the step called with `DEFERRED`; raises `MissingUpdateError` where none
        was. If they do not fit, it waits on; if one fails, it ends with some arguments old."""
        waiting_step(self.pool, self._kept.entries.values()).end(self.pool, updates)

    def drop(self, descriptor: BatchDescriptor) -> None:
        """Destroy the graph of one descriptor, if there is one. Raises `PoolBusyError` while a step
        is under way in the pool."""
        in_turn(self.pool, "drop()", functools.partial(self.destroy_graphs, descriptor))

    def destroy_graphs(self, descriptor: BatchDescriptor | None) -> None:
        """The same for who has the pool's turn; all of them, if none is named."""
        kept = self._kept
        self.pool.reset_graphs(kept.take_all() if descriptor is None else kept.take(descriptor))
        kept.clear_buffers()
        if descriptor is None:
            self._sealing.open()

    def look_again(self, descriptor: BatchDescriptor) -> None:
        """See `GraphPool.missed`."""
        entry = self._kept.entries.get(descriptor)
        if entry is not None and not (self._owner_served or self._hot.one_call_a_step):
            entry.unchecked = True

    def _is_behind_a_miss(
        self, entry: Entry, context: ForwardContext, args: Any, kwargs: Any
    ) -> bool:
        """Whether arguments lie elsewhere because a piece before had no graph: then this one has
        none either, and counts so. Raises `StaleInputError` if they do for another reason."""
        try:
            check_arguments(entry, args, kwargs, self.pool, self.runnable)
        except StaleInputError:
            if not self.pool.pieces.is_behind_a_miss(context):
                raise
            self.calls_without_graph += 1
            return True
        entry.unchecked = self._hot.always_checks
        return False

    def _entry_or_none(self, context: ForwardContext) -> Entry | None:
        descriptor = context.descriptor
        try:
            entry = None if descriptor is None else self._kept.entries.get(descriptor)
        except TypeError:
            check_kind("descriptor", descriptor, BatchDescriptor, example="BatchDescriptor(4)")
            raise
        if entry is None:
            return None
        under_way = context.capture or context.token
        again = under_way is not None and entry.captured_in is under_way
        if again or context.capture is not None:
            raise captured_already(descriptor, in_this_step=again)
        self._kept.find_at(context.slot, entry)
        return entry

    def _may_capture(self, context: ForwardContext) -> bool:
        """Whether a call without a graph captures one; it runs eagerly, and counts so, if not."""
        if self._off:
            return False
        allowed = context.capture is not None or self._sealing.may_capture
        if context.descriptor is not None and allowed:
            return True
        reason = self._sealing.miss(context, self._kept.entries)
        self.eager_calls_after_seal += reason is Reason.SEALED
        self.calls_without_graph += reason is Reason.MISSING_GRAPH
        self.pool.missed(context)
        return False

    def _capture(self, context: ForwardContext, args: Any, kwargs: Any) -> Any:
        descriptor = context.descriptor
        check_kind("descriptor", descriptor, BatchDescriptor, example="BatchDescriptor(4)")
        assert descriptor is not None
        capture = Capture(
            self.pool,
            self._kept.bridges,
            context,
            Given(
                (args, kwargs),
                self.pool.platform.device_type,
                own=self._owner_served,
                bake=self.options.host_arguments == "bake",
            ),
            breakable=self._breakable,
            breaks=frozenset(self.options.breaks),
            must_break=self.runtime_mode is GraphMode.PIECEWISE,
            hooks=self._segment_hooks,
            share_executables=self.options.share_executables,
        )
        capture.give(tree.tensors((args, kwargs)) if self._owner_served else ())
        body = functools.partial(self._run, args, kwargs, capture)
        entry, result = capture_entry(self, self._kept, capture, body, descriptor, (args, kwargs))
        entry.unchecked = self._hot.checks
        transaction = context.capture
        # A lazy entry gets its slot when the next step looks for it: see `_entry_or_none`.
        self._kept.find_at(-1 if transaction is None else transaction.slot, entry)
        return cloned(result) if self._hot.clones else result

    def _tell_pool(self, context: ForwardContext) -> None:
        transaction = context.capture
        if context.descriptor is not None and (transaction is None or transaction.tells_pool):
            self.pool.captured(self, context.descriptor)

    def _repeat_eagerly(
        self, entry: Entry, context: ForwardContext, error: Exception, args: Any, kwargs: Any
    ) -> Any:
        """A step whose update failed, run eagerly if the host wants that, and counted."""
        allowed = entry.update_failed and self.options.eager_after_failed_update
        if not (allowed and isinstance(context.updates, Mapping)):
            raise error
        self.failed_updates += 1
        self.last_failed_update = f"{type(error).__name__}: {error}"
        return without_gradients(functools.partial(self._run, args, kwargs))

    def _run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], capture: Capture | None = None
    ) -> Any:
        """What the runnable returns, in static buffers where these are asked for."""
        result = self.runnable(*args, **kwargs)
        if capture is not None:
            capture.check_read(strided(result), "the forward returns")
            capture.forward_returned()
        if self.options.outputs != "static":
            return result
        return self._kept.statics.fix(0, result, stays=lambda path, tensor: False)[0]
