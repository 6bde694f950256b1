"""The update of a captured graph by the attention of its host, in graphrt's order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from graphrt.hosts.vllm_ascend.engine import Engine
from graphrt.hosts.vllm_ascend.missing import refuse_waiting
from graphrt.hosts.vllm_ascend.wrapper import ACLGraphWrapper


def updated_by(engine: Engine, update_full_graph_params: Callable[..., Any]) -> Callable[..., None]:
    """vllm-ascend's `update_full_graph_params`, served by graphrt for graphs that it captured.

    It may be called after the wrapper or (for devices that need it so) before it. The host's own
    code updates the sites, on a stream of graphrt's in place of its `update_stream`: it follows the
    graph's last replay on the device, so the host waits for nothing. Raises what that code raises,
    `TaskContractError` where it leaves sites out, and `MissingUpdateError` where a launched graph
    waits for another `GraphParams` than this call updates; the device comes to its end in any case.
    """

    @functools.wraps(update_full_graph_params)
    def served(
        attn_backend: Any,
        update_stream: Any,
        forward_context: Any,
        num_tokens: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        def update(stream: Any) -> None:
            update_full_graph_params(
                attn_backend, stream, forward_context, num_tokens, *args, **kwargs
            )

        wrappers = [each for each in engine.wrappers() if isinstance(each, ACLGraphWrapper)]
        # Two may have a graph of this descriptor: the one that was launched is meant.
        for if_launched in (True, False):
            for wrapper in wrappers:
                if wrapper.update_by(forward_context, update, if_launched=if_launched):
                    return
        refuse_waiting()
        # A graph without sites, or one that graphrt did not capture.
        update(update_stream)

    return served
