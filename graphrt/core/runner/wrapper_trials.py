"""Trials for the graphs of a `GraphWrapper`, whose host runs its own steps.

A bare wrapper replays whatever its host has changed in Python since the capture. With
`trials=WrapperTrials()` its graphs are checked as those of a runner are (checks.py):

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

from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base._undo import Undo, undoing
from graphrt.core.base.errors import StateTooLargeError
from graphrt.core.base.homes import public
from graphrt.core.base.thread_mode import set_for_capture, unseen
from graphrt.core.base.torch_names import inference_guard
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.dispatch.reasons import Dispatch, Reason
from graphrt.core.replay.entry import Entry
from graphrt.core.replay.tasks import DEFERRED
from graphrt.core.runner.checks import Checks, TrialRecord
from graphrt.core.runner.trials import watched
from graphrt.core.trust.places.walk import places_of
from graphrt.core.trust.reads import ReadSet
from graphrt.core.trust.trial import Rows, Trial
from graphrt.core.trust.watching.watch import Trace, Watch


@public("graphrt")
class WrapperTrials:
    """The checks of one wrapper: `GraphWrapper(..., trials=WrapperTrials())`. The level is that of
    the wrapper's options; `strict` ones raise in place of warning."""

    def __init__(self) -> None:
        self._checks: Checks | None = None
        self._reads: ReadSet | None = None
        # The number of each graph among the checks.
        self._slots: dict[BatchDescriptor, int] = {}
        self._numbers = count()
        # Of each graph that was tried, the operators of an eager run that it has stood for.
        self._traces: dict[int, Trace] = {}

    @property
    def records(self) -> tuple[TrialRecord, ...]:
        """The findings, a record for each graph."""
        return () if self._checks is None else tuple(self._checks.records.values())

    def before_capture(self, wrapper: GraphWrapper) -> None:
        """Note what the host has changed since the captures before."""
        if self._checks is None:
            reads = ReadSet(wrapper.runnable, watched=wrapper.options.checks("capture"))
            device_type = wrapper.pool.platform.device_type
            self._reads, self._checks = reads, Checks(wrapper.options, reads, device_type)
        self._checks.look_at_host()

    def captured(self, wrapper: GraphWrapper, descriptor: BatchDescriptor) -> None:
        """A graph was captured; what has changed meanwhile its runnable has changed itself."""
        reads, checks = self._reads, self._checks
        assert reads is not None and checks is not None
        if not checks.on:
            return
        self._slots[descriptor] = next(self._numbers)
        checks.ran_forward(at_every_run=True)
        reads.settle()
        mode = wrapper.runtime_mode
        checks.captured(
            [Dispatch(mode, each, Reason.HIT, slot) for each, slot in self._slots.items()],
            more=True,
        )

    def dropped(self, descriptor: BatchDescriptor | None) -> None:
        """The graph of a descriptor is destroyed, or all of them."""
        if self._checks is None or self._reads is None:
            return
        if descriptor is not None and descriptor in self._slots:
            slot = self._slots.pop(descriptor)
            self._traces.pop(slot, None)
            self._checks.dropped(slot)
        if descriptor is None or not self._slots:
            self._slots.clear()
            self._traces.clear()
            self._checks.reset()
            self._reads.forget()

    def may_replay(
        self, wrapper: GraphWrapper, entry: Entry, context: ForwardContext, args: Any, kwargs: Any
    ) -> bool:
        """Whether a call may be replayed, after a trial where one is due; in the pool's turn."""
        checks, slot = self._checks, self._slots.get(entry.descriptor, -1)
        # A step that waits for its updates has the pool until these come.
        if checks is None or slot < 0 or context.updates is DEFERRED:
            return True
        # Rows there would only ask for a padded step.
        if checks.pending.get(slot) != -1 and next(checks.glances.looks):
            return True
        dispatch = Dispatch(wrapper.runtime_mode, entry.descriptor, Reason.HIT, slot)
        if checks.why_eager(dispatch) is not None:
            return False
        if not checks.wants_trial(slot, None):
            return True
        step = WrapperStep(wrapper, entry, context, args, kwargs)
        try:
            self._try(step, dispatch)
        except StateTooLargeError as error:
            checks.cannot_try(slot, error)
        return checks.records[slot].failure is None

    @undoing
    def _try(self, undo: Undo, step: WrapperStep, dispatch: Dispatch) -> None:
        reads, checks, wrapper, slot = self._reads, self._checks, step.wrapper, dispatch.slot
        assert reads is not None and checks is not None
        undo.later(step.put_back)
        captured = self._traces.get(slot)
        graph = checks.graph_to_try(dispatch)._replace(captured=captured, same_size=True)
        places = places_of(wrapper.runnable)
        trial = Trial(step, graph, places, wrapper.pool.platform, wrapper.options)
        set_for_capture(undo)
        # Its effects are put back: the call itself comes after it.
        verdict = trial.run(undone=True)
        checks.ran_forward(at_every_run=True)
        if step.watch is not None and not checks.records[slot].steps:
            reads.note(step.watch)
            reads.settle()
            checks.glances.aim()
        checks.tried(slot, verdict, None)
        if step.watch is not None and verdict.failure is None:
            self._traces.setdefault(slot, step.watch.trace)


class WrapperStep:
    """The runs of a trial: one call of a wrapper, again and again. See `TriedStep`."""

    sizes: Sequence[tuple[int, int]] = ()
    has_gradients = together = False

    def __init__(
        self, wrapper: GraphWrapper, entry: Entry, context: ForwardContext, args: Any, kwargs: Any
    ) -> None:
        self.wrapper, self.entry = wrapper, entry
        self.watch: Watch | None = None
        self._context, self._args, self._kwargs = context, args, kwargs
        # They may lie in the pool, where a replay makes room for its own results.
        places = unseen(lambda: [*map(_memory_of, tree.tensors(args, kwargs))])
        self._before = [(place, place.clone()) for place in places]

    @undoing
    def put_back(self, undo: Undo) -> None:
        """Have the arguments as they were."""
        # Outside of it those that were made inside could not be written.
        undo.enter(inference_guard(True))
        for place, before in self._before:
            place.copy_(before)

    def eager(self, watch: Watch, rows: Rows = "padded") -> Any:
        self.put_back()
        self.watch = self.watch or watch
        # A partition of Inductor's clears the list of its arguments.
        args, kwargs = tree.copied((self._args, self._kwargs))
        run = partial(self.wrapper.runnable, *args, **kwargs)
        return tree.cloned(watched(watch, None, run))

    def where_asked(self, watch: Watch, gradients: bool, inference: bool) -> Any:
        return self.eager(watch)

    def replay(self) -> Any:
        self.put_back()
        return tree.cloned(self.wrapper._graphs.replay(self.entry, self._context))


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor has in memory, each element once: an expanded one cannot be written. It knows
    nothing of gradients: a parameter could not be written either."""
    place = tensor.detach()
    if place.layout is torch.strided:
        for dim, stride in enumerate(place.stride()):
            if stride == 0 and place.shape[dim] > 1:
                place = place.narrow(dim, 0, 1)
    return place
