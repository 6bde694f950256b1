"""One step of a runner that is run several times, by its graph and eagerly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from graphrt.core.base._undo import Undo
from graphrt.core.base.sharing import cloned
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import Batch
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.guard import SideDoors, side_doors
from graphrt.core.dispatch.reasons import Dispatch
from graphrt.core.inputs.buffers import StaticInputs
from graphrt.core.replay.recording import under_way, warming_up
from graphrt.core.runner.steps.padded_step import PaddedStep
from graphrt.core.trust.gradients import Gradients
from graphrt.core.trust.parts import PartResults
from graphrt.core.trust.watching.watch import Watch

RunPadded = Callable[..., Any]


class AskedForward(Protocol):
    """The forward of eager runs, as far as a trial of what it asks must know it."""

    follows: bool
    gradients: Gradients

    def finding(self, run: Callable[[], Any]) -> Any:
        """Call `run`, in which the forward finds out which gradients it ends."""

    def where(self, gradients: bool, inference: bool, run: Callable[[], Any]) -> Any:
        """Call `run`, in which the forward finds gradients and inference mode on or off."""


class PaddedTrial:
    """A step of `batch` that the graph of `found` would serve; `values` must outlive other steps.

    `run_padded(context, eager, probe)` runs it on padded inputs, `run_unpadded(around)` on its live
    rows, where `around` calls the forward.
    """

    def __init__(
        self,
        batch: Batch,
        reqs: int,
        found: Dispatch,
        step: PaddedStep,
        inputs: StaticInputs,
        run_padded: RunPadded,
        run_unpadded: Callable[[Callable[[Callable[[], Any]], Any]], Any],
        updates: tuple[Any, Any],
        metadata: tuple[Any, Any],
        pads: Sequence[int],
        forward: AskedForward,
        *,
        agreed: bool = False,
    ) -> None:
        self.pads = pads
        self._forward = forward
        self.has_gradients = torch.is_grad_enabled()
        self.finds_gradients = forward.gradients.wanted
        self._batch = batch
        self._tokens = batch.num_tokens
        self._reqs = reqs
        self._found = found
        self._step = step
        self._inputs = inputs
        self._run_padded = run_padded
        self._run_unpadded = run_unpadded
        self._updates_eager, self._updates_replayed = updates
        self._metadata_eager, self._metadata_replayed = metadata
        self.rows, self.live_rows = step.tokens, batch.num_tokens
        self.sizes: Sequence[tuple[int, int]] = ((self.rows, self.live_rows), (step.reqs, reqs))
        self._kept = inputs.padding.kept()
        self.padded = not agreed and (self._tokens < step.tokens or reqs < step.reqs)

    def eager(self, watch: Watch | None, parts: PartResults | None = None) -> Any:
        return self._eager(Probe(watch, parts=parts))

    def where_asked(self, watch: Watch, gradients: bool, inference: bool) -> Any:
        return self._forward.where(gradients, inference, partial(self.eager, watch))

    def find_gradients(self, watch: Watch) -> None:
        self._forward.finding(partial(self.eager, watch))

    def of_padding(self, watch: Watch) -> Any:
        return self._eager(Probe(watch, lambda: self._inputs.reset(self._step.layout)))

    def replay(self) -> Any:
        found = self._found
        self._inputs.padding.put_back(self._kept)
        context = ForwardContext(
            found.mode,
            found.descriptor,
            found.slot,
            self._updates_replayed,
            self._metadata_replayed,
            live=self._batch,
        )
        return _copies(self._run_padded(context, eager=False, probe=None))

    def other_padding(self, watch: Watch) -> Any:
        if not self.padded or not self._inputs.padding.are_kept:
            return None

        def disturb() -> None:
            self._inputs.padding.disturb(self._step.layout, self._tokens, self._reqs)

        return self._eager(Probe(watch, disturb))

    def disturbed(self, watch: Watch) -> Any:
        def disturb() -> None:
            self._inputs.padding.disturb_all(self._step.layout, self._tokens, self._reqs)

        return self._eager(Probe(watch, disturb))

    def unpadded(self, watch: Watch) -> Any:
        if not self.padded:
            return None
        return _copies(self._run_unpadded(Probe(watch).run))

    def _eager(self, probe: Probe) -> Any:
        self._inputs.padding.put_back(self._kept)
        context = ForwardContext(
            GraphMode.NONE,
            self._found.descriptor,
            -1,
            self._updates_eager,
            self._metadata_eager,
            live=self._batch,
        )
        return _copies(self._run_padded(context, eager=True, probe=probe))


class Probe:
    """How an eager run of a step differs from an ordinary one: it is watched, and what is in the
    padding rows may be another."""

    def __init__(
        self,
        watch: Watch | None,
        disturb: Callable[[], None] | None = None,
        parts: PartResults | None = None,
    ) -> None:
        self._watch = watch
        self._parts = parts
        self._disturb = disturb

    def run(self, forward: Callable[[], Any]) -> Any:
        """The forward, on inputs that are filled; what it calls is part of it, as in a warm-up."""
        if self._disturb is not None:
            self._disturb()
        watch = self._watch
        return as_part_of_it(
            forward if watch is None else lambda: watch.around(forward), self, self._parts
        )


def as_part_of_it(
    function: Callable[[], Any], name: object, parts: PartResults | None = None
) -> Any:
    """Call `function`, in which runners and wrappers run what they wrap, as they do in a warm-up.

    Their own graphs and buffers would look like state that the function writes.
    """
    undo = Undo()
    try:
        undo.later(partial(warming_up.set, warming_up.get()))
        warming_up.set(True)
        # So that eager parts are known as such.
        undo.later(partial(side_doors.set, side_doors.get()))
        side_doors.set(SideDoors() if parts is None else parts)
        undo.later(partial(under_way.discard, id(name)))
        under_way.add(id(name))
        result = function()
        undo.now()
        return result
    except BaseException:
        undo.now()
        raise


def copied_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A step's inputs out of the reach of its runs, which may write into them."""
    copied: Mapping[str, Any] = cloned(dict(values))
    return copied


def _copies(outputs: Any) -> Any:
    return cloned(outputs)
