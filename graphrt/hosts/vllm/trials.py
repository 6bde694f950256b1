"""Trials of vLLM's graphs under `GRAPHRT_CHECK`: of FULL ones by a whole step.

`WrapperTrials` says when a graph is tried, and asks for equal bits. A FULL graph of vLLM's has
baked in the lengths of its capture, by which kernels split their work, and fills rows of padding
with anything. So here the model runs eagerly, twice, on the padded inputs and the metadata of the
step itself. Live rows of the graph's outputs may differ from these by as much as the two from one
another, or as rounding.

1. A graph that fails goes into quarantine, its batches run eagerly until vLLM captures again.
2. Each run writes the same rows of the KV cache, with the same values. Models whose state moves on
   with each run are not tried: see `_why_untried`.
3. Ranks of tensor parallelism make the same runs at the same step, and a graph that fails on one
   fails on all. They try no pieces, and look for no changes in Python: each may see one at another
   step.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from graphrt import BatchDescriptor, ForwardContext, GraphMode, GraphOptions
from graphrt.core.base import tree
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.dispatch.reasons import Dispatch, Reason
from graphrt.core.replay.entry import Entry
from graphrt.hosts.engine import Apart, StepTrials, may_try
from graphrt.hosts.table import FullKey
from graphrt.hosts.vllm._state import state
from graphrt.hosts.vllm.log import logger
from graphrt.trust.trials import WrapperStep

_MAMBA = "vllm.model_executor.layers.mamba.abstract"


def is_on() -> bool:
    """Whether `GRAPHRT_CHECK` asks for trials; vLLM's own graphs have none."""
    return GraphOptions().checks("first")


def trials() -> Trials | None:
    """The trials of one wrapper, or of one FULL graph of the V2 runner; None if it has none."""
    return Trials(state.config) if may_try(_why_untried(state.config), logger) else None


def _why_untried(vllm_config: Any) -> Iterator[str]:
    # The module was imported if the model has such layers.
    mamba = getattr(sys.modules.get(_MAMBA), "MambaBase", ())
    for layer in getattr(vllm_config.compilation_config, "static_forward_context", {}).values():
        if isinstance(layer, mamba):
            yield f"each run moves on the state of {type(layer).__name__}"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        yield "a run sets the scales of the KV cache (calculate_kv_scales)"
    parallel = vllm_config.parallel_config
    if getattr(parallel, "enable_eplb", False):
        yield "each run counts for the balance of experts (enable_eplb)"
    if parallel.data_parallel_size > 1:
        yield "idle ranks of data parallelism run other steps"
    if getattr(parallel, "pipeline_parallel_size", 1) > 1:
        yield "a run changes what it was given by the rank before it (pipeline parallelism)"
    if getattr(vllm_config, "kv_transfer_config", None) is not None:
        yield "each run may send its KV cache (kv_transfer_config)"


class Trials(StepTrials):
    """The trials of one wrapper of vLLM's, or of one FULL graph of its V2 runner."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__()
        self.has_ranks = vllm_config.parallel_config.tensor_parallel_size > 1
        self._model = state.model

    def before_capture(self, wrapper: GraphWrapper) -> None:
        if self._skips(wrapper):
            return
        self.begin(wrapper, self._model)
        super().before_capture(wrapper)

    def captured(self, wrapper: GraphWrapper, descriptor: BatchDescriptor) -> None:
        if not self._skips(wrapper):
            super().captured(wrapper, descriptor)

    def _skips(self, wrapper: GraphWrapper) -> bool:
        """Whether these graphs are not tried: pieces, where there are several ranks."""
        return self.has_ranks and wrapper.runtime_mode is not GraphMode.FULL

    def may_replay(
        self, wrapper: GraphWrapper, entry: Entry, context: ForwardContext, args: Any, kwargs: Any
    ) -> bool:
        checks, slot = self._checks, self._slots.get(entry.descriptor, -1)
        if not self.has_ranks or checks is None or slot < 0:
            return super().may_replay(wrapper, entry, context, args, kwargs)
        # As there, without a look at Python.
        record = checks.records[slot]
        if record.failure is None and checks.wants_trial(slot, None):
            dispatch = Dispatch(wrapper.runtime_mode, entry.descriptor, Reason.HIT, slot)
            self._try(WrapperStep(wrapper, entry, context, args, kwargs), dispatch)
        return record.failure is None

    def _try(self, step: WrapperStep, dispatch: Dispatch) -> None:
        if dispatch.mode is not GraphMode.FULL:
            super()._try(step, dispatch)
        elif not isinstance(dispatch.descriptor.variant, FullKey):
            try:
                self.judge(dispatch, step.replay(), lambda: _run(step), _live_tokens())
            finally:
                step.put_back()
        elif state.in_step:
            # The metadata is known after the step alone: see full_trials.py.
            state.to_try = self, dispatch
        elif not self.has_ranks:
            super()._try(step, dispatch)

    def judge(
        self, dispatch: Dispatch, replayed: Any, eager: Callable[[], Any], live: int | None
    ) -> Any:
        """Compare what a graph has left with two eager runs, and note the verdict. Returns the
        outputs of the second run if the graph fails, else None. `live` rows are no padding, None if
        that is unknown. With `strict` a failure is raised."""
        assert self._checks is not None
        mode, descriptor = dispatch.mode, dispatch.descriptor
        if isinstance(descriptor.variant, FullKey):
            descriptor = descriptor.variant.descriptor

        def runs() -> tuple[Any, Any, Any]:
            state.trying = True
            try:
                return replayed, eager(), eager()
            finally:
                state.trying = False

        def differs(found: Apart) -> str:
            if not self._fails_anywhere(found.fails):
                return ""
            return str(found) if found.fails else f"another rank's graph; this one's by {found}"

        graph = f"{mode.name} [{descriptor}]"
        row = state.table.row(mode, descriptor)
        verdict = self.compare(dispatch, graph, runs, slice(0, live), differs, logger, row)
        if verdict is None:
            return None
        _count(graph, "tried" if verdict.failure is None else "quarantined")
        self._checks.tried(dispatch.slot, verdict, None)
        return None if verdict.failure is None else verdict.outputs

    def _fails_anywhere(self, failed: bool) -> bool:
        """Whether a graph fails on this rank of tensor parallelism, or on another one."""
        if not self.has_ranks:
            return failed
        parallel = importlib.import_module("vllm.distributed.parallel_state")
        votes = torch.tensor([int(failed)], dtype=torch.int32, device="cpu")
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=parallel.get_tp_group().cpu_group)
        return bool(votes.item())


def _run(step: WrapperStep) -> Any:
    """An eager run of a call of the V1 runner."""
    step.put_back()
    args, kwargs = tree.copied((step._args, step._kwargs))
    return tree.cloned(step.wrapper.runnable(*args, **kwargs))


def _live_tokens() -> int | None:
    """The tokens of the step before its padding: vLLM's metadata says where its queries begin."""
    metadata = importlib.import_module("vllm.forward_context")._forward_context.attn_metadata
    each = next(iter(metadata.values()), None) if isinstance(metadata, dict) else metadata
    starts = getattr(each, "query_start_loc", None)
    return None if starts is None else int(starts.max())


@functools.cache
def _counter() -> Any:
    from prometheus_client import Counter

    return Counter("graphrt_vllm_trials", "Trials of FULL graphs", ["graph", "verdict"])


def _count(graph: str, verdict: str) -> None:
    """Count a trial among the metrics of this process."""
    _counter().labels(graph, verdict).inc()
