"""Trials of FULL steps of the V2 runner, which replays without a call of the model.

A step is tried after it has run: `execute_model` leaves its inputs and metadata, and what came of
them, for the sampler.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from graphrt.hosts.engine import log_untried
from graphrt.hosts.vllm._state import state
from graphrt.hosts.vllm.full import FullGraph
from graphrt.hosts.vllm.log import logger


class FullTrials:
    """Functions of vLLM's, with trials."""

    def __init__(self) -> None:
        # The runner whose step is under way, and vLLM's descriptor of the graph to try after it.
        self._runner: Any = None
        self._desc: Any = None

    def around_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`GPUModelRunner.execute_model`."""
        signature = inspect.signature(original)

        @functools.wraps(original)
        def execute_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
            given = signature.bind(runner, *args, **kwargs).arguments
            self._runner, state.to_try = runner, None
            try:
                result = original(runner, *args, **kwargs)
            finally:
                self._runner = None
            if runner.supports_mm_inputs:
                log_untried(
                    logger, "a run writes the embeddings that it is given (multimodal, V2 runner)"
                )
            elif state.to_try is not None and not given.get("dummy_run", False):
                self._try(runner)
            return result

        return execute_model

    def around_replay(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`CudaGraphManager.run_fullgraph`."""

        @functools.wraps(original)
        def run_fullgraph(manager: Any, desc: Any) -> Any:
            # Not a speculator's manager.
            state.in_step = self._runner is not None and manager is self._runner.cudagraph_manager
            self._desc = desc
            try:
                return original(manager, desc)
            finally:
                state.in_step = False

        return run_fullgraph

    def around_dispatch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`CudaGraphManager.dispatch`: batches of a graph in quarantine run eagerly."""
        signature = inspect.signature(original)

        @functools.wraps(original)
        def dispatch(manager: Any, *args: Any, **kwargs: Any) -> Any:
            desc = original(manager, *args, **kwargs)
            graph = manager.graphs.get(desc)
            if not isinstance(graph, FullGraph) or not graph.in_quarantine:
                return desc
            given = signature.bind(manager, *args, **kwargs).arguments
            return type(desc)(
                cg_mode=type(desc.cg_mode).NONE,
                num_tokens=given["num_tokens"],
                num_reqs=given["num_reqs"],
                num_active_loras=desc.num_active_loras,
            )

        return dispatch

    def _try(self, runner: Any) -> None:
        (trials, dispatch), state.to_try = state.to_try, None
        step, desc = runner.execute_model_state, self._desc
        replayed = step.hidden_states, step.aux_hidden_states or []
        eager = functools.partial(_run_model, runner, step, desc)
        with torch.inference_mode():
            outputs = trials.judge(dispatch, replayed, eager, step.input_batch.num_tokens)
        if outputs is not None:
            hidden, aux = outputs
            runner.execute_model_state = step._replace(
                hidden_states=hidden, aux_hidden_states=step.aux_hidden_states and aux
            )


def _run_model(runner: Any, step: Any, desc: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run the model as vLLM does without a graph, on the inputs and metadata of a step."""
    contexts = importlib.import_module("vllm.forward_context")
    batch, tokens = step.input_batch, step.input_batch.num_tokens_after_padding
    descriptor = contexts.BatchDescriptor(
        num_tokens=tokens,
        has_lora=runner.lora_config is not None,
        num_active_loras=desc.num_active_loras,
    )
    inputs = {
        "input_ids": batch.input_ids,
        "positions": batch.positions,
        "inputs_embeds": None,
        "intermediate_tensors": None,
        **runner.model_state.prepare_inputs(batch, runner.req_states),
    }
    # vLLM 0.33 tells its experts of padding.
    more = {"is_padding": batch.is_padding} if hasattr(batch, "is_padding") else {}
    with contexts.set_forward_context(
        step.attn_metadata,
        runner.vllm_config,
        num_tokens=tokens,
        cudagraph_runtime_mode=type(desc.cg_mode).NONE,
        batch_descriptor=descriptor,
        slot_mapping=step.slot_mappings_by_layer,
        **more,
    ):
        outputs = runner.model(**inputs)
    hidden, aux = outputs if isinstance(outputs, tuple) else (outputs, [])
    return hidden, aux
