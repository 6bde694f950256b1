"""From vLLM's runtime mode and descriptor to the graphrt context of the step."""

from __future__ import annotations

from typing import Any

from graphrt import BatchDescriptor, ForwardContext, GraphMode
from graphrt.hosts.table import Row, Table
from graphrt.hosts.vllm.log import VllmEagerSteps

KEY = "graphrt"
"""In the extra arguments of a forward context: vLLM's `set_forward_context` has made it."""

MOST = 16384
"""Contexts that are kept: more descriptors than any vLLM captures."""

_NO_GRAPH = ForwardContext(GraphMode.NONE)


class InnerStep(ForwardContext):
    """A step of a context that vLLM made without `set_forward_context`: it may run inside of an
    eager break of another step (DeepSeek-V4.1's decoder replay), so it has graphs in a pool of its
    own."""

    __slots__ = ()


class Steps:
    """Contexts of steps, made once for each pair of mode and descriptor.

    A descriptor of vLLM's is the `variant` of graphrt's: graphs that vLLM tells apart, by whatever
    (adapters, query lengths, requests), stay apart.
    """

    def __init__(self, eager: VllmEagerSteps, table: Table) -> None:
        self.eager = eager
        self._table = table
        # (mode, vLLM's descriptor, is an `InnerStep`) -> the context, and its row of steps.
        self._steps: dict[tuple[str, Any, bool], tuple[ForwardContext, Row]] = {}

    def read(self, context: Any) -> ForwardContext:
        """The step of vLLM's forward context, which begins at the first call.

        It is kept on the context. vLLM copies contexts with another mode (`dataclasses.replace`,
        which leaves our attributes out), and changes the descriptor of one within its step
        (Gemma 4's fast prefill): both are compared at each read, see `step_reader`.
        """
        mode, descriptor = context.cudagraph_runtime_mode, context.batch_descriptor
        begun: ForwardContext | None = vars(context).get("graphrt_begun")
        step = self.of(mode, descriptor, begun=begun, inner=KEY not in context.additional_kwargs)
        if begun is None or begun is _NO_GRAPH:
            context.graphrt_begun = step
        context.graphrt_mode, context.graphrt_descriptor = mode, descriptor
        context.graphrt_step = step
        return step

    def of(
        self,
        mode: Any,
        descriptor: Any,
        *,
        begun: ForwardContext | None = None,
        inner: bool = False,
    ) -> ForwardContext:
        """The context of a step, which begins now, or a further one of the step `begun`."""
        if mode.name == "NONE":
            return _NO_GRAPH
        if descriptor is None:
            self.eager.without_descriptor(mode.name)
            return _NO_GRAPH
        step_and_row = self._steps.get((mode.name, descriptor, inner))
        if step_and_row is None:
            step_and_row = self._new(mode.name, descriptor, inner=inner)
        step, row = step_and_row
        if step is begun:
            return step
        row.steps += 1
        self._table.latest = row
        step.begin_step()
        if begun is not None and begun is not _NO_GRAPH:
            step.token = begun.token
        return step

    def keyed(self, step: ForwardContext, key: Any) -> ForwardContext:
        """The context of a step whose graph depends on `key` as well."""
        assert step.descriptor is not None
        variant, inner = (step.descriptor.variant, key), isinstance(step, InnerStep)
        step_and_row = self._steps.get((step.mode.name, variant, inner))
        if step_and_row is None:
            tokens = step.descriptor.num_tokens
            step_and_row = self._new(step.mode.name, variant, tokens, inner=inner)
        keyed, row = step_and_row
        row.steps += 1
        self._table.latest = row
        keyed.begin_step()
        return keyed

    def _new(
        self, mode: str, key: Any, num_tokens: int | None = None, *, inner: bool
    ) -> tuple[ForwardContext, Row]:
        tokens = key.num_tokens if num_tokens is None else num_tokens
        descriptor = BatchDescriptor(tokens, getattr(key, "num_reqs", None), variant=key)
        kind = InnerStep if inner else ForwardContext
        step = kind(GraphMode[mode], descriptor, dispatcher=self.eager)
        # Without a kept context each step is slower: wrappers look graphs up by the descriptor.
        if len(self._steps) >= MOST:
            return step, Row(step.mode, descriptor)
        step_and_row = self._steps[mode, key, inner] = step, self._table.row(step.mode, descriptor)
        return step_and_row
