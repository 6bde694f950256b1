"""What one captured graph needs at every step, prepared when it is published."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import OutputError, RefusedOpError
from graphrt.core.base.sharing import is_lazy
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.inputs.buffers import StaticInputs
from graphrt.core.inputs.declared import nest
from graphrt.core.inputs.output_axes import at_path, check_tensor
from graphrt.core.inputs.outputs import BatchDims, OutputLayout
from graphrt.core.inputs.transport import InputRing
from graphrt.core.replay.handout import Handout, handouts_of
from graphrt.core.replay.pool import GraphPool
from graphrt.core.runner.host import Bind
from graphrt.core.runner.steps.replayed import Read, Replay, Shape, replay_of
from graphrt.core.trust.watching.watch import Use

_CACHED_SHAPES = 256
"""Per graph; beyond so many pairs of live tokens and requests shapes are found anew."""


class Prepared(NamedTuple):
    """What hands out each tensor of some outputs, its padded shape and its batch axes; and, where a
    tensor is there more than once, which of them is at each place."""

    outputs: tuple[tuple[Handout, Shape, BatchDims], ...] = ()
    order: tuple[int, ...] | None = None

    def filled(self, tree_of: Any, fresh: list[torch.Tensor]) -> Any:
        """The tree of the outputs with `fresh` tensors, one for each of them."""
        order = self.order
        at_places = iter(fresh if order is None else [fresh[place] for place in order])
        return tree.map_tensors(lambda _: next(at_places), tree_of)


class PaddedStep:
    """The padded views that a graph reads, the callable of its mode, and its outputs' live rows."""

    __slots__ = (
        "_axes",
        "_held",
        "_last",
        "_nested",
        "_owned",
        "_prepared",
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
        ring: InputRing | None = None,
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
        self._prepared = Prepared()
        self._shapes: dict[tuple[int, int], list[Shape]] = {}
        # Where what pieces returned last is: often it is there again.
        self._last: tuple[Any, Prepared] = None, Prepared()

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
            return self._prepared.outputs[0][0](shapes[0], handed_out)
        fresh = [
            hand_out(shape, handed_out)
            for (hand_out, _, _), shape in zip(self._prepared.outputs, shapes, strict=True)
        ]
        return self._prepared.filled(outputs, fresh)

    def hold(
        self,
        wrapper: GraphWrapper,
        inputs: StaticInputs,
        pool: GraphPool,
        bind: Bind | None,
        graded: Callable[[Mapping[str, Any]], bool] | None,
    ) -> None:
        """Prepare for steps by what `wrapper` has captured, which return exactly its outputs; those
        whose inputs are `graded` are run by the wrapper."""
        entry = wrapper.entries.get(self.descriptor)
        # The pool may have been cleared: until `recapture()` its steps are without a graph.
        if entry is None or entry.outputs is self._held:
            return
        outputs = entry.outputs
        self._prepared = self._prepare(outputs, pool)
        self._shapes = {}
        read = Read(inputs, self.layout, self.ring, self.readable, bind, graded)
        single = type(outputs) is torch.Tensor
        alone = (self._prepared.outputs[0][0], self._shapes) if single else None
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
            prepared = self._prepare(outputs, pool)
            self._last = seen, prepared
        fresh = [
            hand_out(_live_shape(shape, dims, tokens, reqs), pool.handed_out)
            for hand_out, shape, dims in prepared.outputs
        ]
        return prepared.filled(outputs, fresh)

    def _narrowed(self, outputs: Any, tokens: int, reqs: int) -> Any:
        paths = iter([path for path, leaf in tree.leaves(outputs) if _is_tensor(leaf)])
        made: dict[tuple[int, BatchDims], torch.Tensor] = {}

        def narrowed(tensor: torch.Tensor) -> torch.Tensor:
            dims = self._axes.batch_dims(next(paths))
            live = made.get((id(tensor), dims))
            if live is None:
                live = tensor
                for dim, axis in dims:
                    live = live.narrow(dim, 0, axis.size(tokens, reqs))
                made[id(tensor), dims] = live
            return live

        return tree.map_tensors(narrowed, outputs)

    def _prepare(self, outputs: Any, pool: GraphPool) -> Prepared:
        # One at two places is handed out once, unless their declared rows differ.
        found: dict[tuple[int, BatchDims], torch.Tensor] = {}
        order = []
        for path, leaf in tree.leaves(outputs):
            if _is_tensor(leaf):
                check_tensor(path, leaf)
                self._check_rows(path, leaf)
                key = id(leaf), self._axes.batch_dims(path)
                found[key] = leaf
                order.append(key)
        tensors = list(found.values())
        if len(tensors) > 1:
            _check_sharing(tensors)
        places = {key: place for place, key in enumerate(found)}
        handouts = handouts_of(
            tensors, raw_storages=pool.platform.raw_storages, memory=self._memory_of
        )
        return Prepared(
            tuple(
                (hand_out, tuple(tensor.shape), dims)
                for hand_out, tensor, (_, dims) in zip(handouts, tensors, found, strict=True)
            ),
            None if len(found) == len(order) else tuple(places[key] for key in order),
        )

    def _memory_of(self, tensor: torch.Tensor) -> Hashable:
        """Its storage; of a step's inputs, which the runner packs into one, the input."""
        at = tensor.data_ptr()
        for name, view in self.views.items():
            if view.data_ptr() <= at < view.data_ptr() + view.nbytes:
                return name
        return tensor.untyped_storage().data_ptr()

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
        shapes = [
            _live_shape(shape, dims, tokens, reqs) for _, shape, dims in self._prepared.outputs
        ]
        if len(self._shapes) < _CACHED_SHAPES:
            self._shapes[tokens, reqs] = shapes
        return shapes


def _live_shape(shape: Shape, dims: BatchDims, tokens: int, reqs: int) -> Shape:
    live = list(shape)
    for dim, axis in dims:
        live[dim] = axis.size(tokens, reqs)
    return tuple(live)


def _check_sharing(tensors: Sequence[torch.Tensor]) -> None:
    """Raise `OutputError` for a tensor that shares memory with another one though it does not have
    its values there: torch has put off to conjugate or to negate them."""
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    for tensor, storage in zip(tensors, storages, strict=True):
        if is_lazy(tensor) and storages.count(storage) > 1:
            raise OutputError(
                "the forward returns a tensor together with its conjugate, or its negative, over "
                "one memory",
                got=f"shape {tuple(tensor.shape)} of {tensor.dtype}, put off",
                expected="values that are in memory as they are",
                advice="return resolve_conj() or resolve_neg() of it, or a clone()",
            )


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)
