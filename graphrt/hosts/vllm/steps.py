"""From vLLM's runtime mode and descriptor to the graphrt context of the step."""

from __future__ import annotations

from typing import Any

from graphrt import BatchDescriptor, ForwardContext, GraphMode
from graphrt.hosts.vllm.log import EagerSteps
from graphrt.hosts.vllm.table import Row, Table

KEY = "graphrt"
"""The key of graphrt's context in the extra arguments of vLLM's forward context."""

MOST = 16384
"""Contexts that are kept: more descriptors than any vLLM captures."""

_NO_GRAPH = ForwardContext(GraphMode.NONE)


class Steps:
    """Contexts of steps, made once for each pair of mode and descriptor.

    A descriptor of vLLM's is the `variant` of graphrt's: graphs that vLLM tells apart, by whatever
    (adapters, query lengths, requests), stay apart.
    """

    def __init__(self, eager: EagerSteps, table: Table) -> None:
        self.eager = eager
        self._table = table
        # (mode, vLLM's descriptor) -> the context, and the row that counts its steps.
        self._steps: dict[tuple[str, Any], tuple[ForwardContext, Row]] = {}

    def of(self, mode: Any, descriptor: Any) -> ForwardContext:
        """The context of a step, which begins now."""
        if descriptor is None or mode.name == "NONE":
            return _NO_GRAPH
        step_and_row = self._steps.get((mode.name, descriptor))
        if step_and_row is None:
            step_and_row = self._new(mode.name, descriptor)
        step, row = step_and_row
        row.steps += 1
        step.begin_step()
        return step

    def keyed(self, step: ForwardContext, key: Any) -> ForwardContext:
        """The context of a step whose graph depends on `key` as well."""
        assert step.descriptor is not None
        variant = step.descriptor.variant, key
        step_and_row = self._steps.get((step.mode.name, variant))
        if step_and_row is None:
            step_and_row = self._new(step.mode.name, variant, step.descriptor.num_tokens)
        keyed, row = step_and_row
        row.steps += 1
        keyed.begin_step()
        return keyed

    def _new(
        self, mode: str, key: Any, num_tokens: int | None = None
    ) -> tuple[ForwardContext, Row]:
        tokens = key.num_tokens if num_tokens is None else num_tokens
        descriptor = BatchDescriptor(tokens, getattr(key, "num_reqs", None), variant=key)
        step = ForwardContext(GraphMode[mode], descriptor, dispatcher=self.eager)
        # Without a kept context each step is slower: wrappers look graphs up by the descriptor.
        if len(self._steps) >= MOST:
            return step, Row(step.mode, descriptor)
        step_and_row = self._steps[mode, key] = step, self._table.row(step.mode, descriptor)
        return step_and_row
