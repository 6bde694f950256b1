"""What one captured graph needs at every step, prepared when it is published."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from graphrt.core.base._native_door import NativeReplay
from graphrt.core.base.errors import RefusedOpError
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.inputs.buffers import StaticInputs
from graphrt.core.inputs.declared import nest
from graphrt.core.inputs.layout import StepMoves
from graphrt.core.inputs.outputs import OutputLayout
from graphrt.core.inputs.transport import InputRing
from graphrt.core.replay.entry import Entry
from graphrt.core.replay.handout import LiveOutputs
from graphrt.core.replay.pool import GraphPool
from graphrt.core.runner.host import Bind
from graphrt.core.trust.watching.watch import Use


class PreparedStep:
    """The padded views that a graph reads, what is called or replayed, and its outputs."""

    __slots__ = (
        "_nested",
        "_whole",
        "call",
        "descriptor",
        "entry",
        "layout",
        "native",
        "outputs",
        "readable",
        "reqs",
        "ring",
        "task_names",
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
        # Every request has a token, so a graph for any number of requests needs no more rows.
        self.reqs = descriptor.num_reqs or min(descriptor.num_tokens, inputs.reqs)
        layout = self.layout = inputs.layout(descriptor.num_tokens, self.reqs)
        self.ring = None if layout.fetch is None else ring
        # For the host: what it puts there itself no graph would read.
        self.readable = MappingProxyType(layout.views)
        self.call = call
        self.task_names: frozenset[str] = frozenset()
        self.outputs = LiveOutputs(descriptor, self.reqs, axes, layout.views, owned=owned)
        # What its wrapper has captured, if a step is nothing but to replay it; and what does such
        # a step in C.
        self.entry: Entry | None = None
        self.native: Any = None
        self._nested = inputs.declared.nested
        rows = inputs.padding.with_rows
        self._whole = [(name, view) for name, view in layout.views.items() if name not in rows]

    @property
    def tokens(self) -> int:
        """The tokens that the graph computes."""
        return self.descriptor.num_tokens

    def arguments(self) -> dict[str, Any]:
        """What the forward is called with; nested inputs anew each time, as it may change them."""
        return nest(self.layout.views) if self._nested else self.layout.views

    def fresh_arguments(self) -> dict[str, Any]:
        """The same memory as tensors of its own, for a forward that runs: what it does to their
        shapes, or to which memory they are of, is gone with it."""
        fresh = {name: view.detach() for name, view in self.layout.views.items()}
        return nest(fresh) if self._nested else fresh

    def storages(self) -> frozenset[int]:
        """The addresses of the storages in which every step finds its inputs."""
        return frozenset(view.untyped_storage().data_ptr() for view in self.layout.views.values())

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

    def hold(
        self, wrapper: GraphWrapper, inputs: StaticInputs, pool: GraphPool, bind: Bind | None
    ) -> None:
        """Prepare for steps by what `wrapper` has captured, which return exactly its outputs."""
        entry = wrapper.entries.get(self.descriptor)
        # The pool may have been cleared: until `recapture()` its steps are without a graph.
        if entry is None or entry.outputs is self.outputs.held:
            return
        self.outputs.hold(entry.outputs, pool)
        # With several pieces it is the wrapper that counts them as one step.
        single = entry.graph is not None and wrapper.runtime_mode is GraphMode.FULL
        self.entry = entry if single else None
        # What `bind` reads or writes, and what a pool of the host's does, C does not know.
        if single and bind is None and type(pool) is GraphPool and inputs.all_packed:
            self.native = self._native_replay(entry, inputs, pool)

    def _native_replay(self, entry: Entry, inputs: StaticInputs, pool: GraphPool) -> Any:
        """What runs a step of one graph in C: one that fetches its inputs, and returns one tensor
        over memory that torch can make unreadable. None for others."""
        outputs = self.outputs.single(pool.handed_out)
        if NativeReplay is None or outputs is None or self.ring is None:
            return None
        return NativeReplay(
            entry=entry,
            pool=pool,
            inputs=inputs,
            ring=self.ring,
            fetch=self.layout.fetch,
            graph=entry.graph,
            stream=pool.read_stream_id,
            count=len(self.layout.fields),
            known=self.layout.known,
            shapes=self.outputs.shapes,
            moves=StepMoves,
            outputs=outputs,
        )
