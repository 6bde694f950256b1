"""The findings of checks, as values: what a report says of whether graphs equal their forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode


class TensorUse(NamedTuple):
    """One piece of memory that graphs read, beside their inputs: a whole storage, in `bytes`.

    `name` is where the forward has it, "" where no name was found; `moved` says that another tensor
    is there by now, so that only graphs hold it.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    bytes: int
    written: bool
    moved: bool
    source: str


class UnknownBlock(NamedTuple):
    """Memory in use, outside of graph pools, that graphs may touch and no watched run has used.

    `bytes` is what was asked for, `nodes` how many nodes point to it, `name` where the forward has
    it, "" where no name was found.
    """

    address: int
    bytes: int
    nodes: int
    name: str = ""

    def __str__(self) -> str:
        name = f", {self.name}" if self.name else ""
        return f"{self.bytes} bytes at {self.address:#x}, in {self.nodes} nodes{name}"


class UnknownMemory(NamedTuple):
    """All such blocks, the most used first; what `unread` nodes touch cannot be told."""

    blocks: tuple[UnknownBlock, ...]
    unread: int


class Change(NamedTuple):
    """A place in Python where something else is than at the capture. Of what is no plain value,
    `was` and `now` have the kind, and the name or size, alone."""

    name: str
    was: object
    now: object

    def __str__(self) -> str:
        was, now = repr(self.was), repr(self.now)
        return f"{self.name} = {was}, then {'another ' if was == now else ''}{now}"


class Look(tuple[Change, ...]):
    """The changes that a look has found; empty where all is as it was at the capture."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "nothing has changed"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the places that have changed."""
        return tuple(change.name for change in self)


@dataclass
class TrialRecord:
    """The findings of trials of one graph. `notes` are differences that are no failure."""

    mode: GraphMode
    descriptor: BatchDescriptor
    status: Literal["untried", "tried", "quarantined"] = "untried"
    """"quarantined": its batches run eagerly, and `failure` says why."""
    steps: int = 0
    """How many steps were tried."""
    deterministic: bool = True
    """Whether two eager runs of a step were always equal."""
    failure: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrustReport:
    """What is known of whether the graphs equal their forward.

    `reads` is what watched warm-ups read and wrote beside the inputs, kept alive until `release()`;
    `trials` what came of trying each graph, "untried" until a step or `Host(example=)` has.
    `protected` is memory too large to be saved, and which rows of it warm-ups wrote. `unknown` is
    memory that nodes of tried graphs point to and no watched run has used, None where a device
    cannot tell. With `mixes_rows` live rows depend on padding by design.

    What a host changes in Python is seen at the next step if it is in one of the `watched` dicts,
    and after `glance_steps` steps at most elsewhere; `not_watched` says why there are none.
    `harmless` are the attributes whose changes are looked at no more, as three made no difference.
    """

    reads: tuple[TensorUse, ...] = ()
    trials: tuple[TrialRecord, ...] = ()
    protected: tuple[str, ...] = ()
    unknown: UnknownMemory | None = None
    mixes_rows: bool = False
    watched: int = 0
    glance_steps: int = 0
    not_watched: str = ""
    harmless: tuple[str, ...] = ()

    @property
    def only_graphs_bytes(self) -> int:
        """Bytes that only graphs hold: the forward has let go of them."""
        return sum(use.bytes for use in self.reads if use.moved)
