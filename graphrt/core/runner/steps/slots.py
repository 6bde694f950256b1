"""Slots of a runner: the inputs of its next step, which the host writes in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphrt.core.base.errors import InputSlotError, InvalidBatchError
from graphrt.core.base.option_values import shown
from graphrt.core.batch.descriptor import Batch, is_plain, same
from graphrt.core.capture.sealing import Sealing
from graphrt.core.dispatch.dispatcher import GraphDispatcher
from graphrt.core.dispatch.reasons import Agreed, Dispatch
from graphrt.core.inputs.buffers import StaticInputs, wrong_requests
from graphrt.core.inputs.layout import InputLayout
from graphrt.core.inputs.slot import InputSlot
from graphrt.core.replay.pool import GraphPool
from graphrt.core.replay.recording import under_way
from graphrt.core.runner.steps.padded_step import PaddedStep
from graphrt.core.runner.steps.unpadded import refuse_inside_capture


class Slots:
    """Makes the slots of one runner, and takes them back."""

    def __init__(
        self,
        dispatcher: GraphDispatcher,
        steps: Sequence[PaddedStep | None],
        sealing: Sealing,
        inputs: StaticInputs,
        pool: GraphPool,
        owner: object,
    ) -> None:
        self._owner = owner
        self._dispatcher = dispatcher
        self._steps = steps
        self._sealing = sealing
        self._inputs = inputs
        self._pool = pool
        # The last batch that a graph served, by which version, the graph, and what is known of its
        # step.
        self._last: tuple[Any, ...] = None, None, None, None, None

    def make(self, batch: Batch, agreed: Agreed | None) -> InputSlot:
        """A slot for the inputs of `batch`, where the graph is that serves it."""
        if under_way:
            refuse_inside_capture("slot()")
        # A turn, written out: see `Turn`.
        pool = self._pool
        if pool.owner is not None:
            raise pool.busy_error(self._owner)
        try:
            pool.owner = self._owner
            slot = self._make(batch, agreed)
            pool.owner = None
            return slot
        except BaseException:
            pool.owner = None
            raise

    def _make(self, batch: Batch, agreed: Agreed | None) -> InputSlot:
        inputs, pool = self._inputs, self._pool
        if agreed is None:
            last, version, graph, step, known = self._last
            if version is self._dispatcher.version and same(batch, last):
                graph.batches += 1
                pool.follow_stream()
                slot = inputs.slot_of(*known)
                # What is known of its rows goes by the object.
                slot.batch, slot.maker, slot.planned = last, self, (graph.found, step)
                return slot
        version = self._dispatcher.version
        found: Dispatch | None = None
        # A step that captures its graph first cannot have its inputs in place.
        if not self._sealing.may_capture:
            found = self._dispatcher.dispatch(batch, agreed=agreed)
        tokens, reqs = batch[0], batch[1]
        if reqs is None:
            reqs = self._requests(batch)
        layout: InputLayout | None
        if found is not None and found.slot >= 0:
            step = self._steps[found.slot]
            assert step is not None
            if not 1 <= reqs <= step.reqs:
                raise wrong_requests(reqs, step.reqs)
            layout = step.layout
        else:
            step = None
            fits = found is not None and tokens <= inputs.tokens and reqs <= inputs.reqs
            layout = inputs.layout(tokens, reqs) if fits else None
        pool.follow_stream()
        slot = inputs.slot(layout, tokens, reqs)
        slot.batch, slot.maker, slot.agreed = batch, self, agreed
        if found is not None:
            slot.planned = found, step
            if step is not None and agreed is None and is_plain(batch):
                graph = self._dispatcher.served_by(found.slot)
                self._last = batch, version, graph, step, (layout, slot.moves)
        return slot

    def open(self, slot: InputSlot) -> tuple[Dispatch | None, Mapping[str, Any]]:
        """How the step of a slot is dispatched, and its inputs; None where it is to be dispatched
        now. Raises `InputSlotError`."""
        if slot.maker is not self:
            raise InputSlotError(
                "a slot was given to another runner than made it",
                got=shown(slot),
                expected="a slot of this runner",
                advice="runner.slot(batch) of the runner that is called",
            )
        # As `use` does, which names what is wrong.
        if slot.used or slot.turn != self._inputs.turn:
            slot.use(self._inputs.turn)
        slot.used = True
        if slot.planned is not None:
            found, step = slot.planned
            steps, at = self._steps, found.slot
            if step is None or (at < len(steps) and steps[at] is step):
                return found, slot
        return None, {name: value.clone() for name, value in slot.items()}

    def _requests(self, batch: Batch) -> int:
        """The requests of a batch that does not say how many it has."""
        if batch.query_len:
            return batch.num_tokens // batch.query_len
        if self._inputs.has_requests:
            raise InvalidBatchError(
                "a slot is made before there are inputs, whose shapes would say how many requests "
                "the batch has",
                got=shown(batch),
                expected="num_reqs, or query_len",
                advice="Batch(num_tokens, num_reqs)",
            )
        return min(batch.num_tokens, self._inputs.reqs)
