"""Runs one step: by replaying a graph on padded inputs, by an eager run on the same padded inputs,
or by an eager run on the live rows alone.

`StepEngine` chooses between these; a trial (trials.py) runs one step in several of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from graphrt.core.base import errors, tree
from graphrt.core.base._undo import Undo
from graphrt.core.base.option_values import shown
from graphrt.core.base.thread_mode import unseen
from graphrt.core.base.torch_names import count_dispatch_modes
from graphrt.core.batch.context import ForwardContext, current_context
from graphrt.core.batch.descriptor import Batch, live_query_len
from graphrt.core.batch.modes import GraphMode
from graphrt.core.dispatch.reasons import Reason
from graphrt.core.inputs.buffers import batch_of, reqs_of, wrong_requests
from graphrt.core.inputs.loans import Loans
from graphrt.core.replay.handout import LiveOutputs
from graphrt.core.replay.tasks import DEFERRED, UNCHANGED, WORST_CASE, check_names, failed_half_way
from graphrt.core.runner.contract import Step, Values
from graphrt.core.runner.graph_table import GraphTable, PreparedStep
from graphrt.core.runner.host import Phase

# Constants: CPython 3.11 takes 0.07 us to load the member of an enum.
_NONE, _PIECEWISE = GraphMode.NONE, GraphMode.PIECEWISE

Around = Callable[[Callable[[], Any]], Any]
"""Calls the forward that it is given, once the inputs are filled. Trials pass one that watches the
run."""


class StepExecutor:
    """Runs the steps of one runner, in a turn of its pool."""

    def __init__(self, graphs: GraphTable) -> None:
        setup = graphs.setup
        self.inputs = setup.inputs
        self.pool = setup.pool
        self.graphs = graphs
        # `Host.bind`, called before each run; None if the host has none.
        self._bind = setup.host.bind
        # Whether outputs of eager steps without padding are cloned.
        self._clones = setup.options.outputs == "clone"
        # The last updates that a step had, which UNCHANGED repeats. WORST_CASE if that step failed:
        # UNCHANGED then raises.
        self._last_updates: Any = None

    def updates_of(self, updates: Any) -> Any:
        """The updates of a step: those of the last one for UNCHANGED, else copies. Raises
        `InvalidUpdateError`, and `MissingUpdateError` for UNCHANGED after a step that failed."""
        if updates is DEFERRED:
            raise errors.InvalidUpdateError(
                "a runner takes the updates of a step with its call, not after it",
                got="DEFERRED",
                expected="this step's updates, or UNCHANGED",
                advice="a GraphWrapper takes them after the call, with update()",
            )
        if updates is UNCHANGED:
            if self._last_updates is WORST_CASE:
                self.graphs.check_open()  # new updates would not help
                raise failed_half_way()
        elif updates is None:
            return None
        else:
            # The host may change its own lists in place before it says UNCHANGED.
            self._last_updates = _copied(updates)
        return self._last_updates

    def run(
        self,
        prepared: PreparedStep,
        batch: Batch,
        values: Values,
        context: ForwardContext | None = None,
        *,
        eager: bool = False,
        around: Around | None = None,
    ) -> Any:
        """Fill the buffers of a graph, launch it and hand out the live rows of its outputs.

        Without a `context` the step is a single graph, which is replayed directly: nothing in it
        reads a context. With one the graph's wrapper is called, which replays segments and eager
        parts; or with `eager` the forward, by `around` if that is given. Raises `InvalidInputError`
        and `InvalidBatchError`.
        """
        inputs, pool = self.inputs, self.pool
        tokens, reqs = batch[0], batch[1]
        if reqs is None:
            reqs = reqs_of(inputs, batch, values)
        if not 1 <= reqs <= prepared.reqs:
            raise wrong_requests(reqs, prepared.reqs)
        if pool.closed:
            pool.check_open()
        # A step of pieces replayed last. It ends here; if it may have pieces to come, this raises.
        if context is None and pool.pieces.replaying is not None:
            pool._leave_step(None)
        ring = None if eager else prepared.ring
        streams = pool.streams
        stream = None if streams.read_id is None else streams.follow()
        inputs.fill(values, prepared.layout, tokens, reqs, stream, ring is not None)
        # After the fill: the last step's outputs may be among the inputs.
        if pool.handed_out:
            pool._expire_outputs()
        if self._bind is not None:
            phase: Phase = "eager" if eager else "replay"
            self._bind(MappingProxyType(prepared.layout.views), prepared.descriptor, phase)
        if context is None:
            entry: Any = prepared.entry
            pool.generation += 1
            entry.graph.replay()
            outputs = entry.outputs
        else:
            forward = self.graphs.setup.run_forward
            call = forward if eager else prepared.call
            arguments = prepared.arguments(fresh=call is forward)
            outputs = self._in_context(context, partial(call, **arguments), around)
        if ring is not None:
            ring.launched()
        return prepared.outputs.live(outputs, tokens, reqs)

    def run_padded(self, step: Step, *, eager: bool = False, around: Around | None = None) -> Any:
        """Run a step on the inputs that its graph reads, in a context of its own: by the graph, or
        with `eager` by the forward. Raises `InvalidUpdateError` for updates of no task."""
        graphs, dispatch = self.graphs, step.dispatch
        prepared = graphs.steps[dispatch.slot]
        assert prepared is not None
        context = ForwardContext(
            _NONE if eager else dispatch.mode,
            dispatch.descriptor,
            -1 if eager else dispatch.slot,
            self._updates_for(prepared, step.updates),
            step.metadata,
            num_reqs=prepared.reqs,
            query_len=live_query_len(step.batch) if dispatch.mode is _PIECEWISE else None,
            dispatcher=graphs.dispatcher,
            live=step.batch,
        )
        context.graph_mode = dispatch.mode
        pool = None if eager else prepared.pool_of_pieces
        replays, dispatcher = 0 if pool is None else pool.generation, graphs.dispatcher
        not_served = dispatcher.not_served
        outputs = self.run(prepared, step.batch, step.values, context, eager=eager, around=around)
        # The host has replaced the wrappers of its pieces: nothing was replayed, nobody said so.
        if pool is not None and (replays, not_served) == (pool.generation, dispatcher.not_served):
            dispatcher.not_replayed(context)
        return outputs

    def run_unpadded(self, step: Step, around: Around | None = None) -> Any:
        """Run the forward on the live rows, in a trial by `around`: on copies of them, or on inputs
        that are lent (loans.py). Where ranks found no graph for all they are padded to the rows of
        the largest, as collectives need as many everywhere. Raises `InvalidInputError`, and
        `VerificationError` for a forward that writes what it was lent."""
        inputs, pool = self.inputs, self.pool
        batch, values, descriptor = step.batch, step.values, step.dispatch.descriptor
        tokens, reqs = batch.num_tokens, reqs_of(inputs, batch, values)
        rows = tokens, reqs
        if step.dispatch.reason is Reason.RANKS_DISAGREE:
            rows = descriptor.num_tokens, descriptor.num_reqs or reqs
        is_padded = rows != (tokens, reqs)
        context = ForwardContext(
            _NONE,
            descriptor,
            -1,
            step.updates,
            step.metadata,
            num_reqs=rows[1],
            live=batch,
        )
        context.graph_mode = step.graph_mode
        pool.streams.follow()
        loans = views = None
        # Code of a compiler may keep what it is given until its next call.
        may_lend = around is None and self._bind is None and not self.graphs.setup.compiled
        held = self.graphs.checks.lends() if may_lend else None
        if held is not None and not is_padded and count_dispatch_modes() == 0:
            loans = Loans(inputs, held)
            views = loans.arguments(values, tokens, reqs)
        if views is None:
            loans = None
            # Torch modes of the host are to see the operators of the forward, not these copies.
            copies = partial(inputs.padded_copies, rows=rows) if is_padded else inputs.copies
            views = unseen(partial(copies, values, tokens, reqs))
        # After the copies: the last step's outputs may be among the inputs.
        pool._expire_outputs()
        if self._bind is not None:
            self._bind(MappingProxyType(views), descriptor, "eager")
        forward = partial(self.graphs.setup.run_forward, **inputs.nest(views))
        outputs = self._in_context(context, forward, around)
        if loans is not None:
            del forward, views
            # Replaced, not kept beside: views of inputs among them would count as kept.
            outputs = loans.end(outputs, self.graphs.checks.stop_lending, clones=self._clones)
            kept = loans.kept()
            if kept is not None:
                self.graphs.checks.stop_lending(kept)
            return outputs
        if is_padded:
            axes = self.graphs.setup.outputs
            live = LiveOutputs(descriptor, rows[1], axes, pool.handed_out, raw_storages=False)
            return live.live(outputs, tokens, reqs)
        return (
            tree.cloned(outputs) if self._clones else tree.map_leaves(torch.Tensor.detach, outputs)
        )

    def run_as_part(self, batch: Batch | None, values: Values, updates: Any, metadata: Any) -> Any:
        """Run the forward on copies of the live rows, inside the capture or warm-up of another
        runner or wrapper: it becomes part of the outer graph.

        It runs in the outer context, with the updates and metadata of the outer step. Raises
        `NestedCaptureError` for any of its own, and for a bind, and `InvalidInputError`.
        """
        context = current_context()
        for name, value in (("updates", updates), ("metadata", metadata), ("a bind", self._bind)):
            if value is not None and value is not _of_outer_step(context, name):
                raise errors.NestedCaptureError(
                    f"a runner inside the capture of another one has {name} of its own: replays "
                    "would keep those of the capture",
                    got=shown(value),
                    expected="updates and metadata of the outer step, which replays can change",
                    advice=f"give {name} to the outer runner, or {errors.IN_PIECES}",
                )
        inputs = self.inputs
        if batch is None:
            batch = batch_of(inputs, values)
        tokens, reqs = batch.num_tokens, reqs_of(inputs, batch, values)
        views = inputs.copies(values, tokens, reqs)
        return self.graphs.setup.run_forward(**inputs.nest(views))

    def _in_context(
        self, context: ForwardContext, run: Callable[[], Any], around: Around | None
    ) -> Any:
        """Call `run`, by `around` if that is given, in a context that owns the pool meanwhile: a
        wrapper refuses to run in a pool that another context owns."""
        pool, owner = self.pool, self.graphs.setup.owner
        try:
            pool.owner = context
            with context:
                outputs = run() if around is None else around(run)
            pool.owner = owner
            return outputs
        except BaseException:  # in place of `@undoing`, which costs 0.3 us a step
            pool.owner = owner
            context.leave()
            raise

    def step_failed(self, updates: Any) -> None:
        """Note that a step with these updates failed."""
        if updates is not None and updates is not UNCHANGED:
            self._last_updates = WORST_CASE

    def set_updates_aside(self, undo: Undo) -> None:
        """Have `undo` put the last updates back: until then example steps run, and an UNCHANGED of
        the host must not repeat theirs."""
        undo.later(partial(setattr, self, "_last_updates", self._last_updates))

    def _updates_for(self, prepared: PreparedStep, updates: Any) -> Any:
        """The updates without those of tasks that only other graphs have: the host need not know
        which of its batches run by pieces, without tasks."""
        names = prepared.transaction.task_names
        if updates is None or not isinstance(updates, Mapping) or updates.keys() <= names:
            return updates
        steps = filter(None, self.graphs.steps)
        check_names(updates, frozenset().union(*(each.transaction.task_names for each in steps)))
        return {name: updates[name] for name in names & updates.keys()}


def _of_outer_step(context: ForwardContext | None, name: str) -> Any:
    """The updates or metadata of the step around this one, by their name; None without any."""
    try:
        return getattr(context, name, None)
    except errors.FrozenMetadataError:
        return None  # the outer step has its own, which its capture may not read


def _copied(updates: Any) -> Any:
    """Updates with copies of all their values; what is no mapping is refused later."""
    if not isinstance(updates, Mapping):
        return updates
    return {
        name: (
            {key: _copied_value(value) for key, value in values.items()}
            if isinstance(values, Mapping)
            else values
        )
        for name, values in updates.items()
    }


def _copied_value(value: Any) -> Any:
    if type(value) is int:
        return value
    if isinstance(value, torch.Tensor):
        return value.clone()
    try:
        return copy.copy(value)
    except TypeError:
        # Cannot be copied, as a generator: `HostArg.fitted` refuses it later.
        return value
