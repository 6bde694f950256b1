"""Graphs of vision encoders: vLLM's budgets, buffers and packing, with graphrt's graphs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from graphrt import BatchDescriptor
from graphrt.errors import CaptureError
from graphrt.hosts.vllm._state import state
from graphrt.hosts.vllm.full import FullGraph


class EncoderCaptures:
    """Captures the graph of a budget by graphrt, in `EncoderCudaGraphManager`.

    vLLM prepares the buffers and runs the block that it would capture. graphrt then captures the
    same work, from the input buffers to the output buffer.
    """

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`EncoderCudaGraphManager._capture_budget_graph`, served."""

        signature = inspect.signature(original)

        @functools.wraps(original)
        def capture(*args: Any, **kwargs: Any) -> Any:
            # vLLM 0.33 passes the path and the axis keys by name, 0.24 has no axis keys.
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            manager, token_budget, path, *axis_keys = call.arguments.values()
            result = original(*args, **kwargs)
            state.weights.encoders.add(manager)
            new_budgets = [
                budget
                for budget in manager._get_graph_set(path).values()
                if isinstance(budget.graph, FullGraph) and not budget.graph.filled
            ]
            if len(new_budgets) != 1:
                raise CaptureError(
                    "vLLM made no graph for a budget of its encoder",
                    got=f"{len(new_budgets)} graphs for {token_budget} tokens",
                    expected="1",
                    advice="report it, with the version of vLLM",
                )
            # Not the budget itself: it refers to the graph, which could then never be dropped.
            buffers = new_budgets[0].input_buffers, new_budgets[0].output_buffer
            forward = partial(_encode, manager.model, *buffers, path)
            variant = ("encoder", path, *filter(None, axis_keys))
            descriptor = BatchDescriptor(token_budget, variant=variant)
            new_budgets[0].graph.capture(manager.graph_pool, forward, descriptor)
            return result

        return capture

    def new_graph(self, *args: Any, **kwargs: Any) -> FullGraph:
        """For `torch.cuda.CUDAGraph()`."""
        return FullGraph()

    def capturing(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        """For `torch.cuda.graph(...)`."""
        return nullcontext()


def _encode(model: Any, inputs: Mapping[str, Any], results: torch.Tensor, path: str) -> None:
    with torch.inference_mode():
        results.copy_(model.encoder_cudagraph_forward({**inputs}, path=path))
