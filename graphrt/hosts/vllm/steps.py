"""From vLLM's runtime mode and descriptor to the graphrt context of the step."""

from __future__ import annotations

from typing import Any

from graphrt import BatchDescriptor, ForwardContext, GraphMode
from graphrt.hosts.vllm.log import EagerSteps
from graphrt.hosts.vllm.table import Row, Table

KEY = "graphrt"
"""Under which vLLM's forward context carries the step's."""

MOST = 16384
"""Contexts that are kept: more descriptors than any vLLM captures."""

_NO_GRAPH = ForwardContext(GraphMode.NONE)


class Steps:
    """Contexts of steps, made once for each pair of mode and descriptor.

    A descriptor of vLLM's is the `variant` of graphrt's: no two of its graphs become one, whatever
    it tells them apart by (adapters, query lengths, requests).
    """

    def __init__(self, eager: EagerSteps, table: Table) -> None:
        self.eager = eager
        self._table = table
        self._steps: dict[tuple[str, Any], tuple[ForwardContext, Row]] = {}

    def of(self, mode: Any, descriptor: Any) -> ForwardContext:
        """The context of a step, which begins now."""
        if descriptor is None or mode.name == "NONE":
            return _NO_GRAPH
        known = self._steps.get((mode.name, descriptor))
        if known is None:
            known = self._new(mode.name, descriptor)
        step, row = known
        row.steps += 1
        step.begin_step()
        return step

    def keyed(self, step: ForwardContext, key: Any) -> ForwardContext:
        """The context of a step whose graph depends on `key` as well."""
        assert step.descriptor is not None
        both = step.descriptor.variant, key
        known = self._steps.get((step.mode.name, both))
        if known is None:
            known = self._new(step.mode.name, both, step.descriptor.num_tokens)
        keyed, row = known
        row.steps += 1
        keyed.begin_step()
        return keyed

    def _new(
        self, mode: str, key: Any, num_tokens: int | None = None
    ) -> tuple[ForwardContext, Row]:
        tokens = key.num_tokens if num_tokens is None else num_tokens
        descriptor = BatchDescriptor(tokens, getattr(key, "num_reqs", None), variant=key)
        step = ForwardContext(GraphMode[mode], descriptor, dispatcher=self.eager)
        # One that is not kept is slower, as its graphs are looked up by the descriptor.
        if len(self._steps) >= MOST:
            return step, Row(step.mode, descriptor)
        known = self._steps[mode, key] = step, self._table.row(step.mode, descriptor)
        return known
