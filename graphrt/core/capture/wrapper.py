"""`GraphWrapper`: a callable that is run eagerly, captured or replayed, as the context says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from graphrt.core.base import (
    CaptureError,
    InvalidModeError,
    Uncopied,
    check_callable,
    check_kind,
    tree,
)
from graphrt.core.batch import (
    BatchDescriptor,
    ForwardContext,
    GraphMode,
    current_context,
    graphs_off,
)
from graphrt.core.capture._hot import Hot
from graphrt.core.capture.bridges import Bridges
from graphrt.core.capture.options import GraphOptions
from graphrt.core.capture.recorder import Capture
from graphrt.core.capture.sealing import Sealing
from graphrt.core.device import Capability
from graphrt.core.dispatch import Reason
from graphrt.core.replay import (
    Entry,
    GraphPool,
    SegmentHooks,
    arguments_of,
    check_arguments,
    graphs_of,
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
        operators in `options.breaks`, which are errors in one that is not. `hooks` are called
        around each of its graphs. Raises `InvalidModeError` unless the mode is PIECEWISE or FULL,
        and `InvalidOptionError`.
        """
        check_callable("runnable", runnable)
        check_kind("pool", pool, GraphPool)
        check_kind("options", options, GraphOptions)
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
        self.calls_without_context = 0
        self.calls_without_graph = 0
        self.eager_calls_after_seal = 0
        self.failed_updates = 0
        self.last_failed_update: str | None = None
        self.pool.add_holder(self)
        self._hot = Hot(self.runtime_mode, self.pool, self.options, read_context)
        self._entries: dict[BatchDescriptor, Entry] = {}
        self._bridges = Bridges()
        self._statics = Bridges()
        self._sealing = Sealing(self.options)
        self._off = graphs_off()

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
        if context.mode is not hot.mode:
            return self.runnable(*args, **kwargs)
        try:
            entry = hot.by_slot[context.slot]
        except IndexError:
            entry = None
        if entry is None or entry.descriptor is not context.descriptor:
            entry = self._entry_or_none(context)
            if entry is None:
                return self._first_call(context, args, kwargs)
        if hot.checked:
            check_arguments(entry, args, kwargs)
        pool = hot.pool
        owner = pool.owner
        if owner is not None and owner is not context:
            raise pool.busy_error(context)
        pool.owner = context
        try:
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
                except Exception as error:
                    if entry.update_failed and self.options.eager_after_failed_update:
                        return self._repeat_eagerly(context, error, args, kwargs)
                    raise
            else:
                graph.replay()
            if pool.owner is not context:
                # The check and the store above are two steps: a thread may slip in between.
                raise pool.busy_error(context)
            if hot.clones:
                return tree.map_tensors(torch.Tensor.clone, entry.outputs)
        finally:
            pool.owner = owner
        if entry.container and hot.fresh_containers:
            return tree.copied(entry.outputs)
        return entry.outputs

    def __getattr__(self, name: str) -> Any:
        if name == "runnable":
            raise AttributeError(name)
        return getattr(self.runnable, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.runtime_mode.name}, {len(self._entries)} graphs)"

    @property
    def entries(self) -> Mapping[BatchDescriptor, Entry]:
        """What is captured, by descriptor; a read-only view."""
        return MappingProxyType(self._entries)

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

    def return_what_is_held(self) -> None:
        """Let replays return the entry's outputs themselves, for a caller that keeps them in."""
        self._hot.fresh_containers = False

    def seal(self) -> None:
        """Capture nothing any more: an unseen descriptor runs eagerly, counted, or raises."""
        self._sealing.close()

    def unseal(self) -> None:
        """Allow capturing again."""
        self._sealing.open()

    def clear_graphs(self) -> None:
        """Destroy every graph; the wrapper can capture again.

        Raises `PoolBusyError` while a step is under way in the pool.
        """
        self.pool.check_idle()
        parts = [part for entry in self._entries.values() for part in entry.parts]
        self._entries.clear()
        self._hot.by_slot = [None]
        self.pool.reset_graphs(graphs_of(parts))
        self._bridges.clear()
        self._statics.clear()
        self._sealing.open()

    def drop(self, descriptor: BatchDescriptor) -> None:
        """Destroy the graph of one descriptor, if there is one."""
        entry = self._entries.pop(descriptor, None)
        if entry is not None:
            hot = self._hot
            hot.by_slot = [None if other is entry else other for other in hot.by_slot]
            self.pool.reset_graphs(graphs_of(entry.parts))
            if not self._entries:
                self._bridges.clear()
                self._statics.clear()

    def _entry_or_none(self, context: ForwardContext) -> Entry | None:
        descriptor = context.descriptor
        entry = None if descriptor is None else self._entries.get(descriptor)
        if entry is None:
            return None
        under_way = context.capture or context.token
        again = under_way is not None and entry.captured_in is under_way
        if again or context.capture is not None:
            raise CaptureError(
                "a wrapper was called twice in the step that captures it"
                if again
                else "a descriptor was captured a second time",
                got=descriptor,
                expected="one call for each descriptor",
                advice="give every call site its own wrapper"
                if again
                else "call clear_graphs() or drop(descriptor) before capturing again",
            )
        self._insert(entry, context.slot)
        return entry

    def _first_call(
        self, context: ForwardContext, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        descriptor = context.descriptor
        if self._off:
            return self.runnable(*args, **kwargs)
        allowed = context.capture is not None or self._sealing.may_capture
        if descriptor is None or not allowed:
            reason = self._sealing.miss(context, self._entries)
            self.eager_calls_after_seal += reason is Reason.SEALED
            self.calls_without_graph += reason is Reason.MISSING_GRAPH
            return self.runnable(*args, **kwargs)
        return self._capture(context, descriptor, args, kwargs)

    def _capture(
        self,
        context: ForwardContext,
        descriptor: BatchDescriptor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        options = self.options
        capture = Capture(
            self.pool,
            self._bridges,
            context,
            breakable=self._breakable,
            breaks=frozenset(options.breaks),
            must_break=self.runtime_mode is GraphMode.PIECEWISE,
            hooks=self._segment_hooks,
            share_executables=options.share_executables,
        )
        with torch.no_grad(), capture.recording():
            result = self.runnable(*args, **kwargs)
            capture.check_read(result, "the forward returns")
            if options.outputs == "static":
                result = self._to_static(result)
        outputs = tree.map_tensors(capture.captured_ref, result)
        inputs = arguments_of(args, kwargs)
        transaction = context.capture
        entry = Entry(
            descriptor, tuple(capture.parts), outputs, inputs, transaction or context.token
        )
        self._entries[descriptor] = entry
        if transaction is not None:
            transaction.add(self, functools.partial(self.drop, descriptor))
            self._insert(entry, transaction.slot)
        # A lazy entry gets its slot when the next step looks for it: see `_entry_or_none`.
        if self._hot.clones:
            return tree.map_tensors(torch.Tensor.clone, result)
        return result

    def _repeat_eagerly(
        self,
        context: ForwardContext,
        error: Exception,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The step of a replay whose update failed, run eagerly; counted, with the error's text."""
        if not isinstance(context.updates, Mapping):
            raise error
        self.failed_updates += 1
        self.last_failed_update = f"{type(error).__name__}: {error}"
        with torch.no_grad():
            result = self.runnable(*args, **kwargs)
            return self._to_static(result) if self.options.outputs == "static" else result

    def _insert(self, entry: Entry, slot: int) -> None:
        if slot >= 0:
            by_slot = self._hot.by_slot
            by_slot.extend([None] * (slot + 2 - len(by_slot)))
            by_slot[slot] = entry

    def _to_static(self, result: Any) -> Any:
        fixed, _ = self._statics.fix(0, result, stays=lambda path, tensor: False)
        return fixed
