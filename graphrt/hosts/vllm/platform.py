"""vLLM's platform, with graphrt's wrapper of pieces and graphrt's mark in its forward context."""

from __future__ import annotations

import functools
from typing import Any

from graphrt.core.batch.modes import graphs_off
from graphrt.hosts.names import is_known
from graphrt.hosts.vllm._state import state
from graphrt.hosts.vllm.steps import KEY
from graphrt.hosts.vllm.versions import KNOWN


def serves() -> bool:
    """Whether this is a vLLM that is known, on NVIDIA GPUs. `install` says what is wrong with
    another one: vLLM ignores errors of its platform plugins."""
    import vllm
    from vllm.platforms import cuda_platform_plugin

    return is_known(vllm.__version__, KNOWN) and cuda_platform_plugin() is not None


@functools.cache
def platform_type(base: Any) -> Any:
    """The platform class over one of vLLM's own."""

    class GraphrtPlatform(base):  # type: ignore[misc]
        """vLLM's platform with graphrt's graphs."""

        serves_graphrt = True

        @classmethod
        def get_static_graph_wrapper_cls(cls) -> str:
            if not state.serving:
                return super().get_static_graph_wrapper_cls()  # type: ignore[no-any-return]
            return "graphrt.hosts.vllm.GraphrtWrapper"

        @classmethod
        def support_static_graph_mode(cls) -> bool:
            # vLLM sets its mode to NONE then, and everything that follows from it.
            return not graphs_off()

        @classmethod
        def set_additional_forward_context(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
            extra = super().set_additional_forward_context(*args, **kwargs)
            no_graph = kwargs["cudagraph_runtime_mode"].name == "NONE"
            if no_graph and kwargs["attn_metadata"] is not None:
                state.not_dispatched(kwargs["num_tokens"])
            return {**extra, KEY: True}

    GraphrtPlatform.__name__ = f"Graphrt{base.__name__}"
    return GraphrtPlatform
