"""What one captured graph needs at every step, prepared when it is published."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from graphrt.core.base import OutputError, RefusedOpError, tree
from graphrt.core.batch import BatchDescriptor
from graphrt.core.capture import GraphWrapper
from graphrt.core.inputs import (
    BatchDims,
    OutputLayout,
    SlotRing,
    StaticInputs,
    at_path,
    check_tensor,
    nest,
)
from graphrt.core.replay import GraphPool, Handout, handout_of
from graphrt.core.runner.host import Bind
from graphrt.core.runner.steps.replayed import Read, Replay, Shape, replay_of
from graphrt.core.trust import Use

_CACHED_SHAPES = 256
"""Per graph; beyond so many pairs of live tokens and requests shapes are found anew."""


class PaddedStep:
    """The padded views that a graph reads, the callable of its mode, and its outputs' live rows."""

    __slots__ = (
        "_axes",
        "_handouts",
        "_held",
        "_last",
        "_nested",
        "_owned",
        "_shapes",
        "_whole",
        "call",
        "descriptor",
        "layout",
        "readable",
        "replay",
        "reqs",
        "ring",
        "task_names",
        "tokens",
        "views",
    )

    def __init__(
        self,
        descriptor: BatchDescriptor,
        inputs: StaticInputs,
        call: Callable[..., Any],
        axes: OutputLayout,
        ring: SlotRing | None = None,
        *,
        owned: bool,
    ) -> None:
        """`owned` says that what `call` returns is the caller's, memory and all. From `ring` its
        graph fetches what it reads, unless inputs of this size are too large."""
        self.descriptor = descriptor
        self.tokens = descriptor.num_tokens
        # Every request has a token, so a graph for any number of requests needs no more rows.
        self.reqs = descriptor.num_reqs or min(descriptor.num_tokens, inputs.reqs)
        self.layout = inputs.layout(self.tokens, self.reqs)
        self.views = self.layout.views
        self.ring = None if self.layout.fetch is None else ring
        # For the host: what it puts there itself no graph would read.
        self.readable = MappingProxyType(self.views)
        self.call = call
        self.task_names: frozenset[str] = frozenset()
        self._nested = inputs.nested
        self._whole = [(name, view) for name, view in self.views.items() if name in inputs.whole]
        self._axes = axes
        self._owned = owned
        # The outputs that the graph returns at every step, and what hands out each tensor of them.
        self._held: Any = None
        # Runs a step that is nothing but its graph.
        self.replay: Replay | None = None
        self._handouts: tuple[tuple[Handout, Shape, BatchDims], ...] = ()
        self._shapes: dict[tuple[int, int], list[Shape]] = {}
        # Where what pieces returned last is: often it is there again.
        self._last: tuple[Any, list[tuple[Handout, Shape, BatchDims]]] = None, []

    def arguments(self) -> dict[str, Any]:
        """What the forward is called with; nested inputs anew each time, as it may change them."""
        return nest(self.views) if self._nested else self.views

    def storages(self) -> frozenset[int]:
        """The addresses of the storages in which every step finds its inputs."""
        return frozenset(view.untyped_storage().data_ptr() for view in self.views.values())

    def fresh_arguments(self) -> dict[str, Any]:
        """The same memory as tensors of its own, for a forward that runs: what it does to their
        shapes, or to which memory they are of, is gone with it."""
        fresh = {name: view.detach() for name, view in self.views.items()}
        return nest(fresh) if self._nested else fresh

    def check_written(self, written: Mapping[int, Use]) -> None:
        """Raise `RefusedOpError` if a warm-up has written an input that has no batch axis: that is
        state, of which the next step would bring what was there before."""
        for name, view in self._whole:
            end = view.data_ptr() + view.nbytes
            use = next((u for at, u in written.items() if view.data_ptr() <= at < end), None)
            if use is not None:
                raise RefusedOpError(
                    f"the forward writes input {name!r}, of which it has a copy in the runner's "
                    "buffers: what it writes is lost after the step",
                    op=use.op,
                    source=None if use.source is None else str(use.source),
                    got=f"{name!r} without a batch axis, shape {tuple(view.shape)}",
                    advice="let the forward reach what it advances, such as a KV cache, as an "
                    "attribute or in a closure, and write it in place there; it need not be "
                    "declared. Of what is only scratch memory write a clone()",
                )

    def see(self, outputs: Any) -> None:
        """Note what the forward returned at this size; raises `OutputError`."""
        self._axes.see(self.tokens, self.reqs, outputs)

    def live(self, outputs: Any, tokens: int, reqs: int, pool: GraphPool) -> Any:
        """The live rows of this step's outputs, as the caller gets them."""
        if outputs is not self._held or outputs is None:
            return self._live_anew(outputs, tokens, reqs, pool)
        shapes = self._shapes.get((tokens, reqs))
        if shapes is None:
            shapes = self._find_shapes(tokens, reqs)
        handed_out = pool.handed_out
        if type(outputs) is torch.Tensor:
            return self._handouts[0][0](shapes[0], handed_out)
        fresh = iter(
            [
                hand_out(shape, handed_out)
                for (hand_out, _, _), shape in zip(self._handouts, shapes, strict=True)
            ]
        )
        return tree.map_tensors(lambda _: next(fresh), outputs)

    def hold(
        self, wrapper: GraphWrapper, inputs: StaticInputs, pool: GraphPool, bind: Bind | None
    ) -> None:
        """Prepare for steps by what `wrapper` has captured, which return exactly its outputs."""
        entry = wrapper.entries.get(self.descriptor)
        # The pool may have been cleared: until `recapture()` its steps are without a graph.
        if entry is None or entry.outputs is self._held:
            return
        outputs = entry.outputs
        self._handouts = tuple(self._prepared(outputs, pool))
        self._shapes = {}
        read = Read(inputs, self.layout, self.ring, self.readable, bind)
        single = type(outputs) is torch.Tensor
        alone = (self._handouts[0][0], self._shapes) if single else None
        self.replay = replay_of(self.descriptor, wrapper, pool, self.reqs, read, alone)
        self._held = outputs

    def _live_anew(self, outputs: Any, tokens: int, reqs: int, pool: GraphPool) -> Any:
        """Of outputs that no graph returns, as eager parts and pieces in between make them."""
        if self._owned:
            padded = tokens != self.tokens or reqs != self.reqs
            return self._narrowed(outputs, tokens, reqs) if padded else outputs
        # The same object may have been given other memory, or another shape.
        alone = type(outputs) is torch.Tensor and outputs.layout is torch.strided
        seen = tree.identity(outputs) if alone else None
        if seen is not None and seen == self._last[0]:
            prepared = self._last[1]
        else:
            prepared = self._prepared(outputs, pool)
            self._last = seen, prepared
        fresh = iter(
            [
                hand_out(_live_shape(shape, dims, tokens, reqs), pool.handed_out)
                for hand_out, shape, dims in prepared
            ]
        )
        return tree.map_tensors(lambda _: next(fresh), outputs)

    def _narrowed(self, outputs: Any, tokens: int, reqs: int) -> Any:
        paths = iter([path for path, leaf in tree.leaves(outputs) if _is_tensor(leaf)])

        def narrowed(tensor: torch.Tensor) -> torch.Tensor:
            for dim, axis in self._axes.batch_dims(next(paths)):
                tensor = tensor.narrow(dim, 0, axis.size(tokens, reqs))
            return tensor

        return tree.map_tensors(narrowed, outputs)

    def _prepared(self, outputs: Any, pool: GraphPool) -> list[tuple[Handout, Shape, BatchDims]]:
        raw_storages = pool.platform.raw_storages
        for path, leaf in tree.leaves(outputs):
            if _is_tensor(leaf):
                check_tensor(path, leaf)
                self._check_rows(path, leaf)
        return [
            (
                handout_of(leaf, raw_storages=raw_storages),
                tuple(leaf.shape),
                self._axes.batch_dims(path),
            )
            for path, leaf in tree.leaves(outputs)
            if _is_tensor(leaf)
        ]

    def _check_rows(self, path: str, tensor: torch.Tensor) -> None:
        """Raise `OutputError` for a tensor without the rows that its declared axes give it."""
        for dim, axis in self._axes.batch_dims(path):
            rows = axis.size(self.tokens, self.reqs)
            if tensor.dim() <= dim or tensor.shape[dim] != rows:
                raise OutputError(
                    f"the forward returns another number of rows than before{at_path(path)}",
                    got=f"shape {tuple(tensor.shape)} for [{self.descriptor}]",
                    expected=f"{rows} in dimension {dim}",
                    advice="return the same shape for every batch of one size",
                )

    def _find_shapes(self, tokens: int, reqs: int) -> list[Shape]:
        shapes = [_live_shape(shape, dims, tokens, reqs) for _, shape, dims in self._handouts]
        if len(self._shapes) < _CACHED_SHAPES:
            self._shapes[tokens, reqs] = shapes
        return shapes


def _live_shape(shape: Shape, dims: BatchDims, tokens: int, reqs: int) -> Shape:
    live = list(shape)
    for dim, axis in dims:
        live[dim] = axis.size(tokens, reqs)
    return tuple(live)


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)
