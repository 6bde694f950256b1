"""What a trial runs: a runner's step (`StepRuns`), or a call of a wrapper (`WrapperStep`). `Trial`
(trial.py) makes these runs again and again, by the graph and eagerly, and compares them.

And the checks of a wrapper whose host runs its own steps. A bare wrapper replays whatever its host
has changed in Python since the capture. With `trials=WrapperTrials()` its graphs are checked as
those of a runner are (checks.py):

1. The first replay of each kind of graph is a trial: the runnable runs eagerly beside it. From that
   run it is known which tensors graphs read.
2. At each call it is asked whether the host has changed anything that the runnable looks up. After
   a change the next call of each graph is a trial.
3. A graph that differs from its runnable goes into quarantine, with a warning that names the
   attribute: its calls run eagerly until the host drops and captures it again.

A trial puts back what its runs write, the arguments included. It knows nothing of padding, which is
the host's: rows that are mixed are not found. Steps with `DEFERRED` updates are replayed untried.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.errors import StateTooLargeError
from graphrt.core.base.thread_mode import set_for_capture, unseen
from graphrt.core.base.torch_names import inference_guard
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import BatchDescriptor, unpadded
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture import guard as guards
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.dispatch.reasons import Dispatch, Reason
from graphrt.core.inputs.buffers import reqs_of
from graphrt.core.replay.entry import Entry
from graphrt.core.replay.recording import enter_under_way, warming_up
from graphrt.core.replay.tasks import DEFERRED
from graphrt.core.runner.contract import Step
from graphrt.core.runner.executor import StepExecutor
from graphrt.core.runner.findings import TrialRecord
from graphrt.trust.checks import Checks
from graphrt.trust.padded_inputs import disturb, index_pads, unused_addresses
from graphrt.trust.reads import ReadSet
from graphrt.trust.trial import Rows, Trial, TriedStep
from graphrt.trust.warm_up import WarmedUp
from graphrt.trust.watching.padding import IndexValues, PaddingRows
from graphrt.trust.watching.watch import Watch


def index_values_of(executor: StepExecutor, step: Step) -> IndexValues:
    """The values of a step's index inputs, with the addresses at which graphs read them."""
    declared = executor.inputs.declared
    names = index_pads(declared)
    values = declared.check(step.values, None, None) if names else {}
    views = [each.layout.views for each in executor.graphs.steps if each is not None]
    return {
        name: (values[name], frozenset(view[name].data_ptr() for view in views)) for name in names
    }


class EagerRuns(TriedStep):
    """The runs of a runner's step that has no graph."""

    def __init__(self, executor: StepExecutor, step: Step, padding: PaddingRows) -> None:
        self.padding, self.declared = padding, executor.graphs.setup.host.state
        self.index_values = index_values_of(executor, step)
        self._executor, self._step = executor, step

    def eager(self, watch: Watch, rows: Rows = "padded") -> Any:
        return tree.cloned(self._executor.run_unpadded(self._step, partial(watched, watch, None)))


class StepRuns(TriedStep):
    """The runs of a runner's trial: one step that a graph serves, run again and again.

    `step` is the step with cloned inputs, `executor` runs it. `TriedStep` has the other fields.
    """

    def __init__(
        self, executor: StepExecutor, step: Step, padding: PaddingRows, *, served: bool = True
    ) -> None:
        graphs, inputs = executor.graphs, executor.inputs
        flat = inputs.declared.check(step.values, None, None)
        # Cloned, as inputs may be outputs of the last step, or views of the buffers. Eager runs
        # take `_eager_step`, which may have other metadata than the replay's `step`.
        executor.pool.streams.follow()
        self.step = self._eager_step = step._replace(values=tree.cloned(flat))
        at_bound = graphs.setup.host.metadata
        if at_bound is not None:
            # The graph has baked in the metadata of its capture: eager runs are given the same.
            self.has_metadata = True
            self._eager_step = self.step._replace(metadata=at_bound(step.dispatch.descriptor))
        prepared = graphs.steps[step.dispatch.slot]
        assert prepared is not None
        reqs = reqs_of(inputs, step.batch, step.values)
        padded = prepared.descriptor.num_tokens, prepared.reqs
        live = step.batch.num_tokens, reqs
        # Ranks that agreed on a graph differ in their live rows: no run without padding.
        if padded != live and not (step.agreed or graphs.setup.host.mixes_rows):
            self.sizes = [*zip(padded, live, strict=True)]
        self.declared, self.inputs = graphs.setup.host.state, prepared.transaction.fixed
        self.is_padded = padded != live
        self.padding, self.is_served = padding, served
        self.index_values = index_values_of(executor, step)
        self.unused_rows = unused_addresses(inputs.declared, step.values)
        self.together = step.agreed or graphs.setup.host.ranks is not None
        self.has_gradients = torch.is_grad_enabled()
        self.executor, self._layout = executor, prepared.layout

    def eager(self, watch: Watch, rows: Rows = "padded") -> Any:
        executor, inputs, fill = self.executor, self.executor.inputs, None
        if rows == "padding":
            fill = partial(inputs.reset, self._layout)
        elif rows == "disturbed":
            live = [live for _, live in self.sizes]
            fill = partial(disturb, self._layout, *live)
        around = partial(watched, watch, fill)
        if rows == "alone":
            alone = Dispatch(GraphMode.NONE, unpadded(self.step.batch), Reason.HIT)
            step = self.step._replace(dispatch=alone, graph_mode=self.step.dispatch.mode)
            return tree.cloned(executor.run_unpadded(step, around))
        return tree.cloned(executor.run_padded(self._eager_step, eager=True, around=around))

    def with_gradients(self, watch: Watch, inference: bool) -> Any:
        forward = self.executor.graphs.setup.run_forward
        return forward.where(gradients=True, inference=inference, run=partial(self.eager, watch))

    def replay(self) -> Any:
        return tree.cloned(self.executor.run_padded(self.step))


@undoing
def watched(
    watch: Watch,
    undo: Undo,
    fill: Callable[[], None] | None,
    forward: Callable[[], Any],
) -> Any:
    """Run the forward under `watch`, on inputs that are filled; `fill` fills them again, with other
    rows. Runners and wrappers in the forward run eagerly, as in a warm-up: their graphs and buffers
    would look like state that it writes."""
    if fill is not None:
        fill()
    undo.set(warming_up, True)
    # Tells the watch which operators are of eager parts.
    undo.set(guards.side_doors, _TriedParts(watch))
    enter_under_way(undo, watch)
    return watch.around(forward)


class _TriedParts(guards.SideDoors):
    """Runs the eager parts of a trial's run. Nothing is captured there, so what they make does not
    matter. The watch of a run that is compared with others notes what they are given."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        # Told what each part is given; None if the run is compared with no other.
        self._watch = watch if watch.is_compared else None

    def watched(self, function: Any, args: Any, kwargs: Any, guard: Any = None) -> Any:
        if guards.in_eager_part.get() is not None:
            # A part within a part is part of it.
            return function(*args, **kwargs)
        guards.refuse_transform(function)
        try:
            watch = self._watch
            guards.in_eager_part.set(watch.begin_part(args, kwargs) if watch else frozenset())
            # As in a capture: graph and part each make their own casts.
            torch.clear_autocast_cache()
            result = function(*args, **kwargs)
            torch.clear_autocast_cache()
            return result
        finally:
            guards.in_eager_part.set(None)


# Trials of a wrapper's calls --------------------------------------------------------------------


class WrapperTrials:
    """Checks the graphs of one wrapper while its host steps: `GraphWrapper(...,
    trials=WrapperTrials())`. The level is that of the wrapper's options; with `strict` a failure is
    raised, else warned of.

    - Each kind's first call is a trial, and each graph's next call after a change of the host.
      Quarantine (`MISSING_GRAPH`) lasts until `clear_graphs()`.
    - Arguments are compared at every call; another tensor than at capture is a `StaleInputError`.
      Without `trials=` they are compared at a graph's first replay, from the level "sample" on at
      every one.
    - `KeyedGraphs(pool, trials=WrapperTrials)` makes one for each graph: `graphs[key].trials`. In
      quarantine a key runs its forward, until `drop(key)`.
    - A change before a graph's first trial counts as harmless after one equal call.
    - Mixed rows are not found, since the host pads. Steps with `DEFERRED` updates are untried.
    - A trial runs collectives too, so ranks change their state before the same step.
    """

    def __init__(self) -> None:
        # None until the first capture, which tells the platform and the options.
        self._checks: Checks | None = None
        # descriptor of a graph -> the slot by which the checks know it; a new one for each capture.
        self._slots: dict[BatchDescriptor, int] = {}
        self._numbers = count()
        # slot of a graph that was tried -> an eager run that its replay was equal to.
        self._warm: dict[int, WarmedUp] = {}

    @property
    def records(self) -> tuple[TrialRecord, ...]:
        """The findings, a record for each graph."""
        return () if self._checks is None else tuple(self._checks.records.values())

    def before_capture(self, wrapper: GraphWrapper) -> None:
        """Note what the host has changed since the captures before."""
        if self._checks is None:
            reads = ReadSet(wrapper.runnable, watched=wrapper.options.checks("capture"))
            device_type = wrapper.pool.platform.device_type
            self._checks = Checks(wrapper.options, reads, device_type)
        self._checks.look_at_host()

    def captured(self, wrapper: GraphWrapper, descriptor: BatchDescriptor) -> None:
        """Note a captured graph. What has changed in Python since `before_capture` counts as the
        runnable's own doing."""
        checks = self._checks
        # Without checks nothing is read.
        if checks is None or not checks.on:
            return
        slot = next(self._numbers)
        checks.ran_forward()
        checks.reads.settle()
        captured = Dispatch(wrapper.runtime_mode, descriptor, Reason.HIT, slot)
        checks.captured([captured], more=True)
        # Last: after a Ctrl-C before this the graph has no slot, so its calls run eagerly.
        self._slots[descriptor] = slot

    def dropped(self, descriptor: BatchDescriptor | None) -> None:
        """The graph of a descriptor is destroyed, or all of them."""
        if self._checks is None or not self._checks.on:
            return
        for each in [*self._slots] if descriptor is None else [descriptor]:
            slot = self._slots.pop(each, -1)
            self._warm.pop(slot, None)
            self._checks.dropped(slot)
        if not self._slots:
            self._checks.reset()
            self._checks.reads.forget()

    def may_replay(
        self, wrapper: GraphWrapper, entry: Entry, context: ForwardContext, args: Any, kwargs: Any
    ) -> bool:
        """Whether a call may be replayed, after a trial where one is due; in the pool's turn."""
        checks, slot = self._checks, self._slots.get(entry.descriptor, -1)
        if checks is None or slot < 0:
            return checks is None or not checks.on
        # A step that waits for its updates has the pool until these come.
        if context.updates is DEFERRED:
            return True
        # -1: the next call is to be tried, or compared. Any other value is for trials of padded
        # steps, and here the host pads.
        if checks.pending.get(slot) != -1 and next(checks.glances.looks):
            return True
        dispatch = Dispatch(wrapper.runtime_mode, entry.descriptor, Reason.HIT, slot)
        if checks.why_eager(dispatch) is not None:
            return False
        if not checks.wants_trial(slot, None):
            return True
        try:
            self._try(WrapperStep(wrapper, entry, context, args, kwargs), dispatch)
        except (StateTooLargeError, MemoryError, torch.OutOfMemoryError) as error:
            checks.cannot_try(slot, error)
        return checks.records[slot].failure is None

    @undoing
    def _try(self, undo: Undo, step: WrapperStep, dispatch: Dispatch) -> None:
        """Make the trial of a call, and note its verdict; with `strict` raises the failure."""
        checks, wrapper, slot = self._checks, step.wrapper, dispatch.slot
        assert checks is not None
        undo.later(step.put_back)
        graph, warm = checks.graph_to_try(dispatch), self._warm.get(slot)
        platform, reads = wrapper.pool.platform, checks.reads
        trial = Trial(step, graph, warm, platform, wrapper.options, reads)
        set_for_capture(undo)
        # Its effects are put back: the call itself comes after it.
        verdict = trial.run(undone=True)
        checks.ran_forward()
        if step.watch is not None and not checks.records[slot].steps:
            checks.reads.note(step.watch, result=trial.result)
            checks.reads.settle()
            checks.glances.aim()
        checks.tried(slot, verdict, None)
        if step.watch is not None and verdict.failure is None:
            tokens = dispatch.descriptor.num_tokens
            scratch, trace = trial.scratch_spans(), step.watch.trace
            warm = WarmedUp(tokens, trace, writes=False, captured={}, scratch=scratch)
            self._warm.setdefault(slot, warm)


class WrapperStep(TriedStep):
    """The runs of a wrapper's trial: one call of it, again and again, each on the arguments as they
    were. `watch` is that of the first eager run; None before it."""

    def __init__(
        self, wrapper: GraphWrapper, entry: Entry, context: ForwardContext, args: Any, kwargs: Any
    ) -> None:
        self.wrapper, self.entry = wrapper, entry
        self.watch: Watch | None = None
        self._context, self._args, self._kwargs = context, args, kwargs
        # (view of an argument, its values): an argument may be in the pool, where a replay writes
        # its results over it.
        views = unseen(lambda: [*map(_writable, tree.tensors(args, kwargs))])
        self._before = [(view, view.clone()) for view in views]

    @undoing
    def put_back(self, undo: Undo) -> None:
        """Give the arguments the values that they had."""
        # Tensors that were made in inference mode can be written only in it.
        undo.enter(inference_guard(True))
        for view, before in self._before:
            view.copy_(before)

    def eager(self, watch: Watch, rows: Rows = "padded") -> Any:
        self.put_back()
        self.watch = self.watch or watch
        # Copied, as a piece compiled by Inductor clears the list of its arguments.
        args, kwargs = tree.copied((self._args, self._kwargs))
        run = partial(self.wrapper.runnable, *args, **kwargs)
        return tree.cloned(watched(watch, None, run))

    def replay(self) -> Any:
        self.put_back()
        return tree.cloned(self.wrapper._graphs.replay(self.entry, self._context))


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """A view that has each element in memory once, and no gradients: neither an expanded tensor nor
    a parameter can be written."""
    view = tensor.detach()
    if view.layout is torch.strided:
        for dim, stride in enumerate(view.stride()):
            if stride == 0 and view.shape[dim] > 1:
                view = view.narrow(dim, 0, 1)
    return view
