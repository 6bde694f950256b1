"""`Host`: what a host hooks into a runner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from graphrt.core.batch import BatchDescriptor
from graphrt.core.capture import State
from graphrt.core.replay import SegmentHooks
from graphrt.core.trust import Parameters

Phase = Literal["warmup", "capture", "replay", "eager"]
"""What a runner is about to do with its forward."""

Bind = Callable[[Mapping[str, torch.Tensor], BatchDescriptor, Phase], None]
"""Points the host's metadata at the input buffers, given by (dotted) name."""

AroundCapture = Callable[[], AbstractContextManager[object]]
"""Makes what is entered once around everything that one call captures."""


@dataclass(frozen=True)
class Host:
    """What a host hooks into a runner; everything has a default.

    `bind(buffers, descriptor, phase)` is called before every warm-up, capture, replay and eager
    step; the buffers have the padded shapes of the descriptor, in an eager step the live ones. At
    warm-up and capture all rows of the inputs are padding: what decides which kernels run (query
    lengths, the longest context) must be written there at its worst case. `state` is what the
    forward advances: it is saved once for each capture and restored. `parameters` are tensors whose
    addresses `weights_changed()` compares, or their module. `around_capture` makes a context
    manager for each capture as a whole (registration with communicators), `around_graph` is called
    around each graph (weight offloaders).
    """

    bind: Bind | None = None
    state: Iterable[State | torch.Tensor] = ()
    parameters: Parameters = None
    around_capture: AroundCapture = nullcontext
    around_graph: SegmentHooks | None = None
