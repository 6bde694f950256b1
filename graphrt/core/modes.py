"""Graph modes, attention support, and how a requested mode becomes the one that runs."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graphrt.core.errors import InvalidModeError, InvalidOptionError, ModeNotSupportedError


class GraphMode(enum.Enum):
    """What is captured for uniform decode batches and for mixed ones."""

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"

    # Members are singletons, so identity hashing is right and much cheaper than Enum's own.
    __hash__ = object.__hash__

    @classmethod
    def parse(cls, value: GraphMode | str) -> GraphMode:
        """A mode from itself or its name in any case; raises `InvalidModeError`."""
        if isinstance(value, GraphMode):
            return value
        try:
            return cls[value.strip().upper()]
        except (KeyError, AttributeError):
            raise InvalidModeError(
                "unknown graph mode",
                got=repr(value),
                expected=", ".join(cls.__members__),
                advice='mode="FULL_AND_PIECEWISE"',
            ) from None

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
        return self.decode_mode is GraphMode.FULL

    @property
    def has_piecewise(self) -> bool:
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


_DECODE_AND_MIXED = {
    GraphMode.NONE: (GraphMode.NONE, GraphMode.NONE),
    GraphMode.PIECEWISE: (GraphMode.PIECEWISE, GraphMode.PIECEWISE),
    GraphMode.FULL: (GraphMode.FULL, GraphMode.FULL),
    GraphMode.FULL_DECODE_ONLY: (GraphMode.FULL, GraphMode.NONE),
    GraphMode.FULL_AND_PIECEWISE: (GraphMode.FULL, GraphMode.PIECEWISE),
}


class AttentionSupport(enum.IntEnum):
    """The widest kind of batch whose attention may be captured in a FULL graph."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


class PieceProvider(enum.Enum):
    """What cuts a forward into pieces."""

    BREAKABLE = "breakable"
    FX = "fx"
    INDUCTOR = "inductor"

    @classmethod
    def parse(cls, value: PieceProvider | str | None) -> PieceProvider | None:
        """A provider from itself or its name, None for none; raises `InvalidOptionError`."""
        if value is None or isinstance(value, PieceProvider):
            return value
        try:
            return cls(value.strip().lower())
        except (ValueError, AttributeError):
            raise InvalidOptionError(
                "unknown provider of pieces",
                got=repr(value),
                expected=", ".join(provider.value for provider in cls) + ", or None",
                advice='pieces="breakable"',
            ) from None


@dataclass(frozen=True)
class ResolutionStep:
    """One change of mode on the way: which rule, from what, to what, and why."""

    rule: str
    before: GraphMode
    after: GraphMode
    why: str
    backend: str | None = None


@dataclass(frozen=True)
class ModeResolution:
    """The mode that runs and the ordered steps that led to it."""

    requested: GraphMode
    mode: GraphMode
    steps: tuple[ResolutionStep, ...] = field(default=())


def resolve_mode(
    requested: GraphMode | str | None,
    *,
    attention: AttentionSupport | Mapping[str, AttentionSupport] = AttentionSupport.ALWAYS,
    query_lens: Sequence[int] = (1,),
    pieces: PieceProvider | str | None = PieceProvider.BREAKABLE,
    whole_graph_pass: bool = False,
    pooling: bool = False,
    strict: bool = False,
) -> ModeResolution:
    """The mode that a model can run in, by the table of DESIGN section 4.

    `attention` is the model's support, or the support of each of its backends by name, of which
    the lowest decides. `query_lens` are the decode query lengths (the largest matters).
    `whole_graph_pass` says that pieces are off because a compiler pass must see the whole graph.
    With `strict`, a step down raises `ModeNotSupportedError` instead.
    """
    backend, support = _lowest(attention)
    provider = None if whole_graph_pass else PieceProvider.parse(pieces)
    query_len = max(query_lens, default=1)
    if requested is None:
        requested = default_mode(pieces=provider is not None, pooling=pooling)
    requested = GraphMode.parse(requested)

    steps: list[ResolutionStep] = []
    mode = requested

    def step(rule: str, after: GraphMode, why: str, decided_by: str | None = None) -> None:
        nonlocal mode
        if after is mode:
            return
        if strict:
            raise ModeNotSupportedError(
                f"mode {requested.name} is not supported here: {why}",
                got=mode.name,
                expected=f"{after.name} or lower",
                advice=f"mode={after.name!r}, or strict=False to step down",
            )
        steps.append(ResolutionStep(rule, mode, after, why, decided_by))
        mode = after

    who = "attention" if backend is None else f"attention backend {backend!r}"
    full_decode = support >= AttentionSupport.UNIFORM_BATCH or (
        support is AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE and query_len == 1
    )
    if mode.has_full and not full_decode:
        why = f"{who} supports {support.name}, decode has query length {query_len}"
        step("attention-decode", GraphMode.PIECEWISE, why, backend)
    elif mode is GraphMode.FULL and support is not AttentionSupport.ALWAYS:
        why = f"{who} supports {support.name}, so mixed batches cannot be one graph"
        step("attention-mixed", GraphMode.FULL_AND_PIECEWISE, why, backend)
    if provider is None:
        if whole_graph_pass:
            why = "a pass must see the whole graph, so nothing provides pieces"
            whole = mode is GraphMode.FULL_AND_PIECEWISE and support is AttentionSupport.ALWAYS
            step("whole-graph", GraphMode.FULL if whole else mode.without_pieces(), why)
        else:
            step("no-pieces", mode.without_pieces(), "nothing provides pieces")
    return ModeResolution(requested, mode, tuple(steps))


def default_mode(*, pieces: bool, pooling: bool = False) -> GraphMode:
    """FULL_AND_PIECEWISE with pieces, else NONE; pooling models PIECEWISE."""
    if pooling:
        return GraphMode.PIECEWISE
    return GraphMode.FULL_AND_PIECEWISE if pieces else GraphMode.NONE


def _lowest(
    attention: AttentionSupport | Mapping[str, AttentionSupport],
) -> tuple[str | None, AttentionSupport]:
    if isinstance(attention, Mapping):
        if not attention:
            return None, AttentionSupport.ALWAYS
        name = min(attention, key=lambda key: attention[key])
        return name, AttentionSupport(attention[name])
    return None, AttentionSupport(attention)
