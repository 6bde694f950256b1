"""How a requested mode becomes the one that runs, step by step (DESIGN section 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graphrt.core.base.errors import ModeNotSupportedError
from graphrt.core.batch.modes import AttentionSupport, GraphMode, PieceProvider


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
