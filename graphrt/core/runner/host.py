"""`Host`: what a host hooks into a runner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from graphrt.core.base import InvalidOptionError, only_known
from graphrt.core.batch import Batch, BatchDescriptor
from graphrt.core.capture import State
from graphrt.core.replay import SegmentHooks
from graphrt.core.trust import Parameters, check_parameters

Phase = Literal["warmup", "capture", "replay", "eager"]
"""What a runner is about to do with its forward."""

Bind = Callable[[Mapping[str, torch.Tensor], BatchDescriptor, Phase], None]
"""Points the host's metadata at the input buffers, given by (dotted) name."""

AroundCapture = Callable[[], AbstractContextManager[object]]
"""Makes what is entered once around everything that one call captures."""


@only_known
@dataclass(frozen=True)
class Example:
    """One step that a graph can be tried with: its inputs by name, in live shapes, and what its
    context has beside them. Index rows must be of scratch memory: what they address is written."""

    values: Mapping[str, Any]
    updates: Any = None
    metadata: Any = None


MakeExample = Callable[[Batch, torch.Generator], Example]
"""Makes a step of a batch, with random numbers of the generator, which is of the CPU."""


@only_known
@dataclass(frozen=True)
class Host:
    """What a host hooks into a runner; everything has a default.

    `bind(buffers, descriptor, phase)` is called before every warm-up, capture, replay and eager
    step; the buffers have the padded shapes of the descriptor, in an eager step the live ones.
    At warm-up and capture all rows of the inputs are padding: what decides which kernels run
    (query lengths, the longest context) must be written there at its worst case. `state` is
    what the forward advances and no watched warm-up shows (kernels without a schema, Python
    objects, all of it with `check="off"`): it is saved once for each capture and restored.
    `parameters` says where weights are that `weights_changed()` compares: their module, a dict
    or list that the forward itself reads, or a function that returns the tensors in use
    (`model.parameters`); where warm-ups are watched, and where the forward is a module or a
    method of one, none need be named. `around_capture` makes a context manager for each capture
    as a whole (registration with communicators), `around_graph` is called around each graph
    (weight offloaders). `metadata(descriptor)` is the context's metadata at warm-up and
    capture. To give it declares that graphs may read it and keep it for every step, so it must
    be at its bound (the longest context, say); else only eager parts may read metadata.
    `mixes_rows` declares that live rows depend on padding rows by design, as with the capacity
    of experts or a scale that is found over a whole batch: no trial looks for it.
    `example(batch, generator)` makes a step, so that graphs are tried in `capture()`: the
    largest and the smallest of each kind, where a failure is raised. Without it the first
    served steps are the trials. Raises `InvalidOptionError` for a hook of another kind.
    """

    bind: Bind | None = None
    state: Iterable[State | torch.Tensor] = ()
    parameters: Parameters = None
    around_capture: AroundCapture = nullcontext
    around_graph: SegmentHooks | None = None
    metadata: Callable[[BatchDescriptor], object] | None = None
    mixes_rows: bool = False
    example: MakeExample | None = None

    def __post_init__(self) -> None:
        if self.bind is not None and not callable(self.bind):
            raise _wrong_hook("bind", self.bind, "a function of buffers, descriptor and phase")
        around = self.around_capture
        if not callable(around) or isinstance(around, AbstractContextManager):
            raise _wrong_hook("around_capture", around, "a function that returns a context manager")
        hooks = self.around_graph
        names = ("before_capture", "end_of_capture", "before_replay")
        if hooks is not None and not all(callable(getattr(hooks, name, None)) for name in names):
            raise _wrong_hook("around_graph", hooks, f"an object with {', '.join(names)}")
        if isinstance(self.state, torch.Tensor | torch.nn.Module | Mapping | str) or not isinstance(
            self.state, Iterable
        ):
            raise _wrong_hook("state", self.state, "an iterable of State and tensors")
        # An iterator can be read only once, and every capture reads it.
        object.__setattr__(self, "state", tuple(self.state))
        for each in self.state:
            if not isinstance(each, State | torch.Tensor):
                raise _wrong_hook("state", each, "State and tensors")
        check_parameters(self.parameters)
        if self.example is not None and not callable(self.example):
            raise _wrong_hook("example", self.example, "a function of a batch and a generator")
        if self.metadata is not None and not callable(self.metadata):
            raise _wrong_hook("metadata", self.metadata, "a function of a descriptor")

    def at_bound(self, descriptor: BatchDescriptor) -> object:
        """What `metadata` gives for a warm-up or capture; None without it."""
        return None if self.metadata is None else self.metadata(descriptor)


def _wrong_hook(name: str, value: object, expected: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"Host({name}=) cannot be used",
        got=repr(value)[:200],
        expected=expected,
        advice=f"Host({name}=...) as the docstring of Host says",
    )
