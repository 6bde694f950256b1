"""Graph modes, attention support, and how a requested mode becomes the one that runs."""

from __future__ import annotations

import enum
import os
from typing import Literal, TypeAlias, TypeVar

from graphrt.core.base.errors import GraphRTError, InvalidModeError, InvalidOptionError
from graphrt.core.base.option_values import nearest, refused

MODE_VARIABLE = "GRAPHRT_MODE"
"""The variable of the environment that turns all graphs off: see `graphs_off`."""
E = TypeVar("E", bound=enum.Enum)


class GraphMode(enum.Enum):
    """What is captured for uniform decode batches and for mixed ones.

    FULL is one graph for either, PIECEWISE pieces for either; FULL_DECODE_ONLY is one graph for
    decode and nothing else, FULL_AND_PIECEWISE one graph for decode and pieces for the rest.
    """

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"

    # Members are singletons, so identity hashing is right and much cheaper than Enum's own.
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"GraphMode.{self.name}"

    @classmethod
    def parse(cls, value: GraphMode | str) -> GraphMode:
        """A mode from itself or its name in any case; raises `InvalidModeError`."""
        return _member(cls, value, "graph mode", "mode", "FULL", InvalidModeError)

    @classmethod
    def parse_runtime(cls, value: GraphMode | str, what: str) -> GraphMode:
        """Like `parse`, of a mode that one step can run in; `what` is for the message.

        Raises `InvalidModeError` for the others, such as FULL_AND_PIECEWISE.
        """
        mode = cls.parse(value)
        if not mode.is_runtime_mode:
            runs = " or ".join(each.name for each in mode.runtime_modes)
            advice = f"{mode.name} is for hosts: its steps run in {runs}"
            raise refused(what, mode, "NONE, PIECEWISE or FULL", advice, InvalidModeError)
        return mode

    @property
    def decode_mode(self) -> GraphMode:
        """The runtime mode of a uniform decode batch."""
        return _DECODE_AND_MIXED[self][0]

    @property
    def mixed_mode(self) -> GraphMode:
        """The runtime mode of any other batch."""
        return _DECODE_AND_MIXED[self][1]

    @property
    def is_runtime_mode(self) -> bool:
        """Whether a single step can run in this mode: NONE, PIECEWISE or FULL."""
        return self.decode_mode is self

    @property
    def has_full(self) -> bool:
        """Whether decode batches are one graph."""
        return self.decode_mode is GraphMode.FULL

    @property
    def has_piecewise(self) -> bool:
        """Whether mixed batches are pieces."""
        return self.mixed_mode is GraphMode.PIECEWISE

    @property
    def runtime_modes(self) -> tuple[GraphMode, ...]:
        """The runtime modes that graphs are captured for, FULL first."""
        modes = dict.fromkeys((self.decode_mode, self.mixed_mode))
        return tuple(mode for mode in modes if mode is not GraphMode.NONE)

    def without_pieces(self) -> GraphMode:
        """The mode that is left when nothing provides pieces."""
        if self is GraphMode.PIECEWISE:
            return GraphMode.NONE
        if self is GraphMode.FULL_AND_PIECEWISE:
            return GraphMode.FULL_DECODE_ONLY
        return self


Mode: TypeAlias = (
    GraphMode | Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
)
"""How hosts name a mode in code; `GraphMode.parse` takes text in any case."""


_DECODE_AND_MIXED = {
    GraphMode.NONE: (GraphMode.NONE, GraphMode.NONE),
    GraphMode.PIECEWISE: (GraphMode.PIECEWISE, GraphMode.PIECEWISE),
    GraphMode.FULL: (GraphMode.FULL, GraphMode.FULL),
    GraphMode.FULL_DECODE_ONLY: (GraphMode.FULL, GraphMode.NONE),
    GraphMode.FULL_AND_PIECEWISE: (GraphMode.FULL, GraphMode.PIECEWISE),
}


class AttentionSupport(enum.IntEnum):
    """The widest kind of batch whose attention may be captured in a FULL graph: none, one token a
    request, equally many tokens a request, any."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3

    @classmethod
    def parse(cls, value: AttentionSupport | str | int) -> AttentionSupport:
        """A level from itself, its number or its name in any case; raises `InvalidOptionError`."""
        if isinstance(value, int) and not isinstance(value, bool) and value in list(cls):
            return cls(value)
        return _member(cls, value, "level of attention support", "attention", "UNIFORM_BATCH")


class PieceProvider(enum.Enum):
    """What cuts a forward into pieces: eager breaks, a split of the traced graph, or Inductor."""

    BREAKABLE = "breakable"
    FX = "fx"
    INDUCTOR = "inductor"

    @classmethod
    def parse(cls, value: PieceProvider | str | None) -> PieceProvider | None:
        """A provider from itself or its name, None for none; raises `InvalidOptionError`."""
        if value is None:
            return None
        return _member(cls, value, "provider of pieces", "pieces", "breakable")


def _member(
    kind: type[E],
    value: object,
    what: str,
    argument: str,
    usual: str,
    error: type[GraphRTError] = InvalidOptionError,
) -> E:
    """A member from itself or its name in any case; raises `error`, which advises the
    nearest name, or the `usual` one."""
    if isinstance(value, kind):
        return value
    # Providers are written as their values, in small letters.
    names = [each.value if isinstance(each.value, str) else each.name for each in kind]
    member = kind.__members__.get(value.strip().upper()) if isinstance(value, str) else None
    if member is None:
        advice = f"{argument}={nearest(value, names) or usual!r}"
        raise refused(f"unknown {what}", value, ", ".join(names), advice, error)
    return member


def graphs_off() -> bool:
    """Whether `GRAPHRT_MODE=NONE` turns all graphs of this process off.

    Raises `InvalidModeError` for another value: the mode of a model is its host's to choose.
    """
    text = os.environ.get(MODE_VARIABLE, "").strip()
    if text and text.upper() != GraphMode.NONE.name:
        what, advice = "can only turn graphs off", "pass mode= to the plan or the runner"
        raise refused(f"{MODE_VARIABLE} {what}", text, "NONE", advice, InvalidModeError)
    return bool(text)
