"""`Host`: what a host hooks into a runner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from graphrt.core.base.option_values import check_kind, check_takes, flag, items_of, refused
from graphrt.core.batch.descriptor import Batch, BatchDescriptor
from graphrt.core.capture.state import State
from graphrt.core.replay.entry import SegmentHooks

Phase = Literal["warmup", "capture", "replay", "eager"]
"""What a runner is about to do with its forward."""

Bind = Callable[[Mapping[str, torch.Tensor], BatchDescriptor, Phase], None]
"""Points the host's metadata at the input buffers, given by (dotted) name."""

AroundCapture = Callable[[], AbstractContextManager[object]]
"""Makes the context manager that is entered once around all that one call captures."""


@dataclass(frozen=True)
class Example:
    """One step that a graph can be tried with: its inputs by name, in live shapes, and what its
    context has beside them. Index rows must be of scratch memory: what they address is written."""

    values: Mapping[str, Any]
    updates: Any = None
    metadata: Any = None

    def __post_init__(self) -> None:
        example = '{"input_ids": torch.ones(4)}'
        check_kind("values", self.values, Mapping, optional=False, example=example)


MakeExample = Callable[[Batch, torch.Generator], Example]
"""Makes a step of a batch, with random numbers of the generator, which is of the CPU."""


Run = Callable[..., Any]
"""Runs a step of a batch, values, updates, metadata, and the graph that ranks agreed on."""


class Ranks(Protocol):
    """Ranks that capture the same graphs, and take the same one at every step: a
    `graphrt.ranks.Agreement`."""

    def entrance(self, graphs: Any, run: Run) -> Run:
        """A function that is called for each step of the runner with these `graphs`, in the place
        of `run`, which it calls."""

    def agree_on_captures(self, graphs: Any, wanted: Sequence[str]) -> None:
        """Before the `wanted` graphs are captured: raise where another rank wants others."""

    def agree_on_attempt(self, graphs: Any, again: bool | None) -> bool:
        """After each attempt at a capture, which is to be made `again`, or has failed for good
        (None): whether all ranks make another one. And under `graph_bytes`, after a capture:
        whether one of them lacks bytes."""


@dataclass(frozen=True)
class Host:
    """What a host hooks into a runner; everything has a default.

    `bind(buffers, descriptor, phase)` is called before every warm-up, capture, replay and eager
    step; the buffers have the padded shapes of the descriptor, in an eager step the live ones.
    At warm-up and capture all rows of the inputs are padding: what decides which kernels run
    (query lengths, the longest context) must be written there at its worst case. `state` is
    what the forward advances and no watched warm-up shows (kernels without a schema, Python
    objects, all of it with `check="off"`): it is saved and restored around each
    capture, and each run of a trial.
    `around_capture` makes a context manager for each capture
    as a whole (registration with communicators), `around_graph` is called around each graph
    (weight offloaders). `metadata(descriptor)` is the context's metadata at warm-up and
    capture. To give it declares that graphs may read it and keep it for every step, so it must
    be at its bound (the longest context, say); else only eager parts may read metadata.
    `mixes_rows` declares that live rows depend on padding rows by design, as with the capacity
    of experts or a scale that is found over a whole batch: no trial looks for it.
    `example(batch, generator)` makes a step, so that graphs are tried in `capture()`: the
    largest and the smallest of each kind, where a failure is raised. Without it the first
    served steps are the trials. `ranks` is a `graphrt.ranks.Agreement`, for ranks whose graphs
    hold collectives: they vote on every step, and capture the same graphs. Raises
    `InvalidOptionError` for a hook of another kind.
    """

    bind: Bind | None = None
    state: Iterable[State | torch.Tensor] = ()
    around_capture: AroundCapture = nullcontext
    around_graph: SegmentHooks | None = None
    metadata: Callable[[BatchDescriptor], object] | None = None
    mixes_rows: bool = False
    example: MakeExample | None = None
    ranks: Ranks | None = None

    def __post_init__(self) -> None:
        check_takes("bind", self.bind, "bind(buffers, descriptor, phase)", optional=True)
        check_takes("example", self.example, "example(batch, generator)", optional=True)
        check_takes("metadata", self.metadata, "metadata(descriptor)", optional=True)
        if self.ranks is not None and not hasattr(type(self.ranks), "entrance"):
            advice = "graphrt.ranks.Agreement()"
            raise refused("Host(ranks=) cannot be used", self.ranks, "an Agreement", advice)
        check_takes("around_capture", self.around_capture, "around_capture()")
        check_kind("around_graph", self.around_graph, SegmentHooks)
        flag("mixes_rows", self.mixes_rows)
        # An iterator can be read only once, and every capture reads it.
        state = items_of("state", self.state, "[tensor]")
        allowed = () if isinstance(self.state, torch.Tensor) else State | torch.Tensor
        wrong = [each for each in state if not isinstance(each, allowed)]
        if wrong:
            expected = "State and tensors in a list"
            advice = "Host(state=[tensor])"
            raise refused("Host(state=) cannot be used", wrong[0], expected, advice)
        object.__setattr__(self, "state", state)
