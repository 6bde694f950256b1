"""`GraphOptions`: how graphs are captured and replayed, for runners and wrappers alike; and
`Sealing`: what `lazy` and `strict` mean at a step."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal

from graphrt.core.base import option_values
from graphrt.core.base.errors import CaptureSealedError, InvalidOptionError
from graphrt.core.batch.context import ForwardContext
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.device.platform import Platform
from graphrt.core.dispatch.reasons import Reason

CHECK_LEVELS = ("off", "capture", "first", "sample", "always")
"""How much is checked, each level with all of those before it."""

CHECK_VARIABLE = "GRAPHRT_CHECK"
"""The variable of the environment that sets the level of a whole process."""

_LEAST_STATE = 64 << 20
_OF_FREE_MEMORY = 16
"""Saved state may take a sixteenth of the free memory, and at least `_LEAST_STATE` bytes."""
_MOST_WARMUPS = 1000
"""More are a mistake: they would look like a capture that hangs."""


@dataclass(frozen=True)
class GraphOptions:
    """How graphs are captured and replayed. What batches there are is the `Plan`'s.

    - `outputs` ("pool"): "pool" hands out pool memory, valid until the pool's next step; "static"
      copies inside the graph into one buffer of the largest size; "clone" copies after each replay.
    - `breaks` (none): operators, "ns::op" or "ns::op.overload", at which breakable capture breaks,
      and which may not be captured in a PIECEWISE step at all.
    - `lazy` (False): capture a graph at the first step that asks for it, until `seal()`.
    - `max_graphs` (None), `graph_bytes` (None): the most graphs that a runner, a lazy wrapper or
      `KeyedGraphs` has, and the most bytes that these take, executables included. Lazily the least
      used graph makes room; `capture()` stops there. See `docs/how-to/memory.md`.
    - `strict` (False): raise where a step would run eagerly after `capture()` or `seal()` though it
      should have a graph, and where the mode, or what is captured, is less than was asked for.
      Before that steps are eager all the same.
    - `check` ("capture"): how much is done to find out whether graphs stand for their forward; each
      level does what those before it do. "off": nothing; "capture": warm-ups are watched, graphs
      tried, settings compared at every step; "first": the first step of every graph is tried;
      "sample": one step in 64 is, and all that graphs read is looked at in every step; "always":
      every step is. See `docs/concepts/trust.md`; `GRAPHRT_CHECK` sets it for a whole process.
    - `host_arguments` ("refuse"): CPU tensors among the arguments of a device's graph. "refuse"
      raises where one is read, as every replay would have its numbers of the capture; "bake" keeps
      those numbers, for hosts with a descriptor for each set of them.

    Of runners alone:

    - `warmups` (None): how often a forward runs before each capture, 0 to 1000. None: once before
      the first graph of a kind; before further ones only where the platform needs that, or a
      capture without it has failed.
    - `max_padding` (None): the largest ratio of a graph's tokens to the batch's, 1 or more.
    - `state_limit_bytes` (None): how much state is saved, declared or found, in bytes; None: a
      sixteenth of the device's free memory, and at least 64 MiB.
    - `inputs_in_graph` (True): graphs fetch a step's inputs themselves, where the platform can;
      else they are copied before.
    - `find_nan` (False): look for NaN in the outputs of steps, and name the operator that made it;
      "inf": for infinities too. Steps take longer. See `docs/how-to/observing.md`.

    Values are checked when the options are made; raises `InvalidOptionError`.
    """

    outputs: Literal["pool", "static", "clone"] = "pool"
    breaks: tuple[str, ...] = ()
    lazy: bool = False
    strict: bool = False
    check: Literal["off", "capture", "first", "sample", "always"] = "capture"
    host_arguments: Literal["refuse", "bake"] = "refuse"
    warmups: int | None = None
    max_padding: float | None = None
    state_limit_bytes: int | None = None
    inputs_in_graph: bool = True
    max_graphs: int | None = None
    graph_bytes: int | None = None
    find_nan: bool | Literal["inf"] = False

    def __post_init__(self) -> None:
        option_values.check_fields(self, _CHECKS)
        if self.strict and (self.max_graphs or self.graph_bytes):
            raise InvalidOptionError(
                "under a limit of graphs some steps run eagerly, and strict allows none",
                got=f"strict=True, max_graphs={self.max_graphs}, graph_bytes={self.graph_bytes}",
                advice="leave strict out; the reasons of a report count eager steps",
            )

    @classmethod
    def from_dict(cls, options: Mapping[str, object]) -> GraphOptions:
        """Options from names and values."""
        return cls().merged(options)

    def checks(self, level: str) -> bool:
        """Whether what `level` does is done: `check` and all before it, or those of the process.

        Raises `InvalidOptionError` for a `GRAPHRT_CHECK` that is no level.
        """
        option_values.choice(*CHECK_LEVELS)("level", level)
        return CHECK_LEVELS.index(self._level()) >= CHECK_LEVELS.index(level)

    def of_process(self) -> GraphOptions:
        """These options, with the level of `GRAPHRT_CHECK` if that is set. Raises
        `InvalidOptionError` for one that is no level."""
        return self.merged({"check": self._level()})

    def _level(self) -> str:
        asked = os.environ.get(CHECK_VARIABLE, "").strip().lower() or self.check
        if asked not in CHECK_LEVELS:
            raise InvalidOptionError(
                f"{CHECK_VARIABLE} is no level of checking",
                got=option_values.shown(asked),
                expected=", ".join(CHECK_LEVELS),
                advice=f"{CHECK_VARIABLE}=capture",
            )
        return asked

    def state_limit(self, platform: Platform) -> int:
        """How many bytes of state are saved on the current device of `platform`."""
        if self.state_limit_bytes is not None:
            return self.state_limit_bytes
        figures = platform.memory_figures()
        # A trial holds some copies more; what an allocator keeps to itself counts as taken.
        return max(_LEAST_STATE, 0 if figures is None else figures.free_bytes // _OF_FREE_MEMORY)

    def merged(self, changes: Mapping[str, object]) -> GraphOptions:
        """A copy with these values in place of its own."""
        if not isinstance(changes, Mapping):
            raise option_values.wrong_type(
                "options", changes, "a dict of options", "{'outputs': 'clone'}"
            )
        option_values.check_keys(changes, GraphOptions)
        return replace(self, **dict(changes))  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """Only JSON types; `from_dict` gives equal options back."""
        options = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**options, "breaks": list(self.breaks)}


NO_LIMIT: Final = {"max_graphs": None, "graph_bytes": None}
"""Options of a wrapper whose owner has the limit."""

_CHECKS: dict[str, option_values.Check] = {
    "outputs": option_values.choice("pool", "static", "clone"),
    "breaks": option_values.operators,
    "lazy": option_values.flag,
    "strict": option_values.flag,
    "check": option_values.choice(*CHECK_LEVELS),
    "host_arguments": option_values.choice("refuse", "bake"),
    "warmups": option_values.optional(option_values.whole(0, 1, _MOST_WARMUPS)),
    "max_padding": option_values.optional(option_values.padding_ratio),
    "state_limit_bytes": option_values.optional(option_values.whole(0, _LEAST_STATE)),
    "inputs_in_graph": option_values.flag,
    "max_graphs": option_values.optional(option_values.whole(1, 64)),
    "graph_bytes": option_values.optional(option_values.whole(1, 1 << 30)),
    "find_nan": option_values.nan_choice,
}


class Sealing:
    """What `lazy` and `strict` mean, for a wrapper as for a runner.

    Lazily, a graph is captured at the first step that asks for it, until it is sealed. Strictly, a
    step that has no graph though it should is an error once it is sealed.
    """

    __slots__ = ("_lazy", "_strict", "closed", "may_capture")

    def __init__(self, options: GraphOptions) -> None:
        self._lazy = options.lazy
        self._strict = options.strict
        self.open()

    def open(self) -> None:
        """Allow capturing."""
        self.closed = False
        # Whether a step may capture what it misses: read at every step.
        self.may_capture = self._lazy

    def in_session(self, begun: bool) -> None:
        """A capture session has begun, or ended: with `lazy`, capturing is allowed in it, and not
        after it."""
        if self._lazy:
            (self.open if begun else self.close)()

    def close(self) -> None:
        """Capture nothing any more."""
        self.closed = True
        self.may_capture = False

    @property
    def refuses(self) -> bool:
        """Whether a step that should have a graph may not run eagerly."""
        return self._strict and self.closed

    def miss(self, context: ForwardContext, held: Collection[BatchDescriptor]) -> Reason:
        """Why a wrapper that has the graphs `held` runs a step of its own mode eagerly.

        What announced the step is told. Strictly, raises `CaptureSealedError` for a descriptor that
        nobody found a graph for, and `CaptureSealedError` for a graph that must be here.
        """
        known = ", ".join(map(str, held)) or "a graph of the wrapper, which has none yet"
        if context.dispatcher is not None:
            context.dispatcher.not_replayed(context)
        if self.closed and not context.announced:
            self.refuse(
                "a graph would have to be captured after seal()",
                got=context.descriptor,
                expected=known,
            )
            return Reason.SEALED
        if self._strict:
            # Others are numbers of kept contexts, which say nothing.
            slot = f", slot {context.slot}" if context.announced else ""
            raise CaptureSealedError(
                "a wrapper has no graph for the step that its context announces",
                got=f"{context.mode.name} [{context.descriptor}]{slot}",
                expected=known,
                advice="capture before publish(), allow GraphOptions(lazy=True), or use "
                "strict=False to run it eagerly",
            )
        return Reason.MISSING_GRAPH

    def refuse(
        self,
        what: str,
        *,
        got: object,
        expected: str,
        advice: str = "add the size to sizes=, or use strict=False to run it eagerly",
    ) -> None:
        """Raise `CaptureSealedError` if a step that should have a graph may not run eagerly."""
        if self.refuses:
            raise CaptureSealedError(what, got=got, expected=expected, advice=advice)
