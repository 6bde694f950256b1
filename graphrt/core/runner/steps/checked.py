"""Steps that are not simply replayed: tried ones, and those that a check lets run eagerly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch

from graphrt.core.base._undo import Undo
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.sharing import cloned
from graphrt.core.base.thread_mode import set_for_capture
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import Batch, BatchDescriptor
from graphrt.core.batch.descriptor import unpadded as unpadded_of
from graphrt.core.batch.modes import GraphMode
from graphrt.core.dispatch.reasons import Dispatch, Reason
from graphrt.core.inputs.buffers import reqs_of
from graphrt.core.runner.host import Example, MakeExample
from graphrt.core.runner.steps.checks import Checks
from graphrt.core.runner.steps.padded import PaddedSteps
from graphrt.core.runner.steps.padded_step import PaddedStep
from graphrt.core.runner.steps.tried import AskedForward, PaddedTrial, copied_values
from graphrt.core.runner.steps.unpadded import UnpaddedSteps
from graphrt.core.runner.steps.updates import LastUpdates
from graphrt.core.trust._verdict import Verdict
from graphrt.core.trust.places.walk import places_of
from graphrt.core.trust.trial import Trial
from graphrt.core.trust.warm_up import WarmedUp

_SEED = 0
"""Of the generator that examples are made with: the same on every rank."""


class CheckedSteps:
    """Runs the steps of one runner that its checks do not let through."""

    def __init__(
        self,
        forward: Any,
        checks: Checks,
        steps: Sequence[PaddedStep | None],
        warmed_up: Mapping[Hashable, WarmedUp],
        padded: PaddedSteps,
        unpadded: UnpaddedSteps,
        updates: LastUpdates,
        eager_forward: AskedForward,
        *,
        limit_bytes: Callable[[], int],
        mixes_rows: bool,
        at_bound: Callable[[BatchDescriptor], object] | None,
        keep_touched: Callable[[Collection[BatchDescriptor]], None],
    ) -> None:
        """`keep_touched` is called when graphs have been tried: what their nodes point to, and no
        operator has shown, is read too."""
        self._keep_touched = keep_touched
        self._at_bound = at_bound
        self._forward = forward
        self._checks = checks
        self._steps = steps
        self._warmed_up = warmed_up
        self._mixes_rows = mixes_rows
        self._padded = padded
        self._unpadded = unpadded
        self._updates = updates
        self._limit_bytes = limit_bytes
        self._eager_forward = eager_forward

    def run(
        self,
        batch: Batch,
        found: Dispatch,
        values: Mapping[str, Any],
        updates: Any,
        metadata: Any,
        agreed: bool = False,
    ) -> tuple[Dispatch, Any]:
        """Run a step that a graph would serve; returns how it ran, and its live outputs.

        Where ranks have `agreed` on its size each has its own live rows: what would then be done by
        some of them only, or at other sizes, is left out.
        """
        with self._updates.noted(updates):
            return self._run(batch, found, values, updates, metadata, agreed)

    def _run(
        self,
        batch: Batch,
        found: Dispatch,
        values: Mapping[str, Any],
        updates: Any,
        metadata: Any,
        agreed: bool,
    ) -> tuple[Dispatch, Any]:
        checks, slot = self._checks, found.slot
        reason = checks.why_eager(found)
        padded = batch.num_tokens < found.descriptor.num_tokens and not agreed
        differing = self._differing(slot, values) if reason is None and padded else None
        if reason is None and checks.wants_trial(found.slot, differing):
            step = self._step(batch, found, values, updates, metadata, agreed)
            verdict = self._try(step, found)
            if verdict.failure is not None:
                found = self._padded.dispatcher.run_eagerly(found, batch, Reason.QUARANTINED)
            if step.padded and differing is None:
                differing = self._differing(slot, values)
            self._note(slot, verdict, differing)
            return found, verdict.outputs
        if reason is None:
            step_updates = self._resolved(updates, found, batch, replayed=True)
            context = ForwardContext(
                found.mode, found.descriptor, found.slot, step_updates, metadata, live=batch
            )
            return found, self._padded.run(batch, found, values, context, eager=False)
        eager = self._padded.dispatcher.run_eagerly(found, batch, reason)
        if agreed:
            context = ForwardContext(
                GraphMode.NONE,
                found.descriptor,
                -1,
                self._resolved(updates, found, batch, replayed=False),
                metadata,
                live=batch,
            )
            outputs = self._padded.run(batch, found, values, context, eager=True)
            checks.look_after_eager_step()
            return eager, outputs
        given = self._resolved(updates, None, batch, replayed=False)
        return eager, self._unpadded.run(batch, eager, values, given, metadata)

    def try_examples(self, make: MakeExample, release: Callable[[], None]) -> None:
        """Try the graphs that have to be with steps of the host's own: with padding where there is
        room for it. Raises the first failure, after `release`."""
        generator = torch.Generator("cpu").manual_seed(_SEED)
        try:
            with self._updates.set_aside():
                self._try_each(make, generator)
        except BaseException:
            release()
            raise

    def _try_each(self, make: MakeExample, generator: torch.Generator) -> None:
        for found in self._checks.to_try():
            batch = _example_of(found.descriptor, self._steps[found.slot])
            example = make(batch, generator)
            if not isinstance(example, Example):
                raise InvalidOptionError(
                    "Host(example=) made no step",
                    got=type(example).__name__,
                    expected="a graphrt.Example",
                    advice="return Example(values={...})",
                )
            step = self._step(batch, found, example.values, example.updates, example.metadata)
            verdict = self._try(step, found, undone=True)
            if verdict.failure is not None:
                raise verdict.failure
            differing = self._differing(found.slot, example.values) if step.padded else None
            self._note(found.slot, verdict, differing)

    def eagerly(
        self, batch: Batch, found: Dispatch, values: Mapping[str, Any], updates: Any, metadata: Any
    ) -> Any:
        """Run a step that no graph serves; returns copies of its outputs."""
        given = self._resolved(updates, None, batch, replayed=False)
        outputs = self._unpadded.run(batch, found, values, given, metadata)
        return cloned(outputs)

    def verify(
        self, batch: Batch, found: Dispatch, values: Mapping[str, Any], updates: Any, metadata: Any
    ) -> Verdict:
        """Try one step of a graph, whatever the level of checks is."""
        with self._updates.noted(updates):
            return self._try(self._step(batch, found, values, updates, metadata), found)

    def _step(
        self,
        batch: Batch,
        found: Dispatch,
        values: Mapping[str, Any],
        updates: Any,
        metadata: Any,
        agreed: bool = False,
    ) -> PaddedTrial:
        padded, unpadded = self._padded, self._unpadded
        padded.inputs.declared.check(values, None, None)
        # They may be outputs of the last step, or lie in the buffers.
        padded.pool.follow_stream()
        values = copied_values(values)
        step = self._steps[found.slot]
        assert step is not None
        alone = Dispatch(GraphMode.NONE, unpadded_of(batch), Reason.HIT)
        # The last of them is what the graph is given.
        given = self._resolved(updates, None, batch, replayed=False)
        eager = self._resolved(updates, found, batch, replayed=False)
        replayed = self._resolved(updates, found, batch, replayed=True)

        def run_padded(context: ForwardContext, **how: Any) -> Any:
            return padded.run(batch, found, values, context, **how)

        def run_unpadded(around: Callable[[Callable[[], Any]], Any]) -> Any:
            return unpadded.run(batch, alone, values, given, metadata, around=around)

        return PaddedTrial(
            batch,
            reqs_of(padded.inputs, batch, values),
            found,
            step,
            padded.inputs,
            run_padded,
            run_unpadded,
            (eager, replayed),
            # Graphs have it at its bound, if they have it.
            (metadata if self._at_bound is None else self._at_bound(found.descriptor), metadata),
            padded.inputs.padding.nobodys(values),
            self._eager_forward,
            agreed=agreed,
        )

    def _try(self, step: PaddedTrial, found: Dispatch, *, undone: bool = False) -> Verdict:
        warm = self._warmed_up.get(found.descriptor.kind)
        padded = self._steps[found.slot]
        assert padded is not None
        trial = Trial(
            step,
            name=f"{found.mode.name} [{found.descriptor}]",
            own=padded.storages(),
            device_type=self._padded.pool.platform.device_type,
            limit_bytes=self._limit_bytes(),
            places=places_of(self._forward),
            captured=None if warm is None else warm.trace,
            issued=None if warm is None else warm.captured.get(found.mode),
            precision=self._padded.pool.platform.float32_precision,
            same_size=warm is not None and warm.tokens == padded.tokens,
            mixes_rows=self._mixes_rows,
            pads=step.pads,
            strict=self._checks.strict,
            has_parts=found.mode is GraphMode.PIECEWISE,
            moved=self._checks.moved(found.slot),
        )
        pool, undo = self._padded.pool, Undo()
        try:
            pool._will_put_back("a trial", undo.later)
            # As captures run.
            set_for_capture(undo)
            verdict = trial.run(undone=undone)
            undo.now()
            self._eager_forward.follows |= verdict.asks
            return verdict
        except BaseException:
            undo.now()
            raise

    def _differing(self, slot: int, values: Mapping[str, Any]) -> frozenset[str] | None:
        """The inputs of a padded step that differ from their padding; None if nobody asks."""
        if not self._checks.awaits_padding(slot):
            return None
        return self._padded.inputs.padding.differing(values)

    def _note(self, slot: int, verdict: Verdict, differing: frozenset[str] | None) -> None:
        """Note what came of a trial; strictly, raises the failure."""
        checks = self._checks
        if verdict.failure is None and not checks.records[slot].steps:
            self._keep_touched([checks.records[slot].descriptor])
            checks.look_again()
        checks.tried(slot, verdict, differing)

    def _resolved(
        self, updates: Any, found: Dispatch | None, batch: Batch, *, replayed: bool
    ) -> Any:
        if updates is None:
            return None
        steps = self._steps
        step = None if found is None else steps[found.slot]
        slot = found.slot if found is not None and replayed else -1
        return self._updates.resolve(updates, step, slot, steps, batch)


def _example_of(descriptor: BatchDescriptor, step: PaddedStep | None) -> Batch:
    """A batch that the graph of a descriptor serves, with padding rows if there may be some; where
    it serves any number of requests, of half as many as it has room for."""
    reqs, query_len = descriptor.num_reqs, descriptor.query_len
    if descriptor.uniform and query_len is not None:
        reqs = max(descriptor.num_tokens // query_len - 1, 1)
        tokens = reqs * query_len
    else:
        tokens = max(descriptor.num_tokens - 1, 1)
        room = 1 if step is None else max(step.reqs // 2, 1)
        reqs = min(reqs or room, tokens)
        query_len = None
    return Batch(
        tokens,
        reqs,
        query_len,
        bounds=descriptor.bounds,
        num_active_loras=descriptor.num_active_loras,
        variant=descriptor.variant,
    )
