"""Trials of SGLang's FULL graphs under `GRAPHRT_CHECK`, and eager runs of their forwards.

A graph is tried inside of its step: SGLang has filled its inputs and metadata. It is replayed, then
its forward runs eagerly, twice, on the same. Live rows of the replay's outputs may differ from the
second run's by as much as the two differ, or as rounding. A graph that fails goes into quarantine,
its batches run eagerly until SGLang captures again. Each run writes the same rows of the KV cache,
with the same values; models whose state moves on with each run are not tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from graphrt.core.base import tree
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.dispatch.reasons import Dispatch
from graphrt.hosts.engine import Apart, StepTrials, may_try
from graphrt.hosts.sglang._state import logger, of_shape, state
from graphrt.trust.trials import WrapperStep

_BATCH = "forward_batch"

METADATA = "forward_metadata"
"""Where an attention backend of SGLang's has its views for the batch of the present forward."""


SLOTS = ("input_ids", "positions", "req_pool_indices", "seq_lens", "out_cache_loc")
"""Of a batch, what SGLang copies to the inputs of a graph before each replay."""


class Forward:
    """A forward that a runner of SGLang's captures, which may be called in later steps as well: in
    the context, and with the metadata, of its capture."""

    def __init__(self, forward: Callable[[], Any], contexts: Any) -> None:
        self._forward, self._contexts = forward, contexts
        self._context = contexts.get_forward_context() if contexts.has_forward_context() else None
        self._backend = getattr(self._context, "attn_backend", None)
        self._metadata = getattr(self._backend, METADATA, None)
        code, cells = getattr(forward, "__code__", None), getattr(forward, "__closure__", None)
        names = code.co_freevars if code is not None and cells else ()
        kept = dict(zip(names, cells or (), strict=True))
        # The batch whose tensors the graph reads.
        self._batch = kept[_BATCH].cell_contents if _BATCH in kept else None

    def refill(self) -> list[str]:
        """Copy the batch of the present step to the inputs, and name those that were not filled."""
        stale = []
        for name in SLOTS:
            slot, live = (getattr(each, name, None) for each in (self._batch, state.live))
            if isinstance(slot, torch.Tensor) and isinstance(live, torch.Tensor):
                filled = slot[: live.shape[0]]
                if filled.shape == live.shape and not torch.equal(filled, live.to(filled.dtype)):
                    filled.copy_(live)
                    stale.append(name)
        return stale

    def __call__(self) -> Any:
        if self._context is None:
            return self._forward()
        metadata = getattr(self._backend, METADATA, None)
        if self._metadata is not None:
            setattr(self._backend, METADATA, self._metadata)
        try:
            with self._contexts.forward_context(self._context):
                return self._forward()
        finally:
            if self._metadata is not None:
                setattr(self._backend, METADATA, metadata)


def trials_of(runner: Any) -> Trials | None:
    """The trials of one graph of a runner; None if it has none."""
    return Trials(runner) if may_try(_why_untried(runner), logger) else None


def _why_untried(runner: Any) -> Iterator[str]:
    model_runner = runner.model_runner
    arguments = model_runner.server_args
    if getattr(runner, "_is_full_backend", None) is not None:
        yield "a prefill replaces the layers of its model"
    if getattr(model_runner, "mambaish_config", None) is not None:
        yield "each run moves on the state of its layers (Mamba, linear attention)"
    if getattr(arguments, "pp_size", 1) > 1:
        yield "a run changes what it was given by the rank before it (pp_size)"
    if getattr(arguments, "tp_size", 1) > 1 or getattr(arguments, "dp_size", 1) > 1:
        yield "ranks have to agree on the steps that they try (tp_size, dp_size)"
    if type(runner).__name__ != "DecodeCudaGraphRunner":
        yield f"the drafts of {type(runner).__name__} move on with each run"
    if getattr(model_runner.attn_backend, METADATA, None) is None:
        yield f"{type(model_runner.attn_backend).__name__} has no {METADATA}"


class Trials(StepTrials):
    """The trials of one FULL graph."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = runner

    def before_capture(self, wrapper: GraphWrapper) -> None:
        self.begin(wrapper, self._runner.model_runner.model)
        super().before_capture(wrapper)

    def _try(self, step: WrapperStep, dispatch: Dispatch) -> None:
        forward, key = step.wrapper.runnable, cast(Any, dispatch.descriptor.variant)
        assert self._checks is not None and isinstance(forward, Forward)
        stale: list[str] = []

        def runs() -> tuple[Any, Any, Any]:
            replayed = step.replay()
            stale.extend(forward.refill())
            return replayed, tree.cloned(forward()), tree.cloned(forward())

        def differs(found: Apart) -> str:
            not_filled = (
                f"\n    SGLang did not fill its inputs {', '.join(stale)} before the replay"
            )
            return f"{found}{not_filled if stale else ''}" if stale or found.fails else ""

        rows = slice(0, getattr(self._runner, "raw_num_token", None))
        graph = f"{dispatch.mode.name} [{key[1].size}]"
        row = state.table.row(dispatch.mode, of_shape(key))
        verdict = self.compare(dispatch, graph, runs, rows, differs, logger, row)
        if verdict is not None:
            state.has_failed |= verdict.failure is not None
            self._checks.tried(dispatch.slot, verdict, None)
