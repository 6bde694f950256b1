"""What graphrt asks of vLLM and vllm-ascend while it serves their graphs.

Nothing here imports them: `module` is vllm-ascend's own module of graphs. Its names are looked up
at every use, as vllm-ascend's tests replace some of them.
"""

from __future__ import annotations

import weakref
from typing import Any

from graphrt.core.replay.entry import SegmentHooks


class Engine:
    """The engine around a wrapper, by the names that `vllm_ascend.compilation.acl_graph` has.

    A host that is built like vllm-ascend gives an object with the same names.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def forward_context(self) -> Any:
        """This step's context: `batch_descriptor`, `cudagraph_runtime_mode`, `attn_metadata`."""
        return self._module.get_forward_context()

    def graph_pool(self) -> Any:
        """The handle of the engine's graph pool; wrappers with equal handles share a pool."""
        return self._module.current_platform.get_global_graph_pool()

    def default_options(self) -> Any:
        """The options of a wrapper that is given none: `weak_ref_output`, `debug_log_enable`."""
        return self._module.CUDAGraphOptions()

    def is_debugging(self) -> bool:
        """Whether every replay compares the addresses of its arguments."""
        return bool(self._module.envs.VLLM_LOGGING_LEVEL == "DEBUG")

    def check_capturing_enabled(self) -> None:
        """Raise where the engine has said that nothing is captured any more."""
        self._module.validate_cudagraph_capturing_enabled()

    def count_capture(self) -> None:
        """Add one to the engine's counter of captured graphs."""
        self._module.compilation_counter.num_cudagraph_captured += 1

    def log_capture(self, mode: str, descriptor: Any) -> None:
        """Log that a graph is captured."""
        self._module.logger.debug("Capturing a aclgraph on (%s,%s)", mode, descriptor)

    def wrappers(self) -> weakref.WeakSet[Any]:
        """All wrappers of the process, which sleep mode clears."""
        wrappers: weakref.WeakSet[Any] = self._module._acl_graph_wrappers
        return wrappers

    def params_of(self, forward_context: Any) -> Any:
        """The `GraphParams` that attention fills and updates in this context; None for none.

        By the getters that attention calls: after 0.25 the variables behind them hold one
        `GraphParams` with adapters and one without, and the getters choose by the current context.
        """
        if not getattr(forward_context, "is_draft_model", False):
            return self._module.get_graph_params()
        if getattr(forward_context, "is_draft_model_prefill", False):
            return self._module.get_draft_graph_prefill_params()
        return self._module.get_draft_graph_params()

    def hooks(self) -> SegmentHooks | None:
        """Hooks around each graph for vLLM's weight offloader."""
        return _Offloading()


class _Offloading:
    """vLLM's offloader copies weights on a stream of its own, which a capture must join."""

    def before_capture(self) -> None:
        _offloader().sync_prev_onload()

    def end_of_capture(self) -> None:
        _offloader().join_after_forward()

    def before_replay(self) -> None:
        """vllm-ascend does nothing here."""


def _offloader() -> Any:
    from vllm.model_executor.offloader.base import get_offloader

    return get_offloader()
