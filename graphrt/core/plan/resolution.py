"""How a requested mode becomes the one that runs, step by step (DESIGN section 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from graphrt.core.base import ModeNotSupportedError, logger
from graphrt.core.batch import AttentionSupport, GraphMode, PieceProvider

SWITCHED_OFF = "environment"
"""The rule of the step that `GRAPHRT_MODE=NONE` takes."""


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
    steps: tuple[ResolutionStep, ...] = ()

    def stepped(
        self, rule: str, after: GraphMode, why: str, backend: str | None = None
    ) -> ModeResolution:
        """The resolution with one more step; itself where the mode is that already."""
        if after is self.mode:
            return self
        step = ResolutionStep(rule, self.mode, after, why, backend)
        return replace(self, mode=after, steps=(*self.steps, step))

    def log_steps(self) -> None:
        """Say in the log, in one line, that the mode that runs is not the requested one."""
        if self.steps:
            why = (f"{step.before.name} to {step.after.name}, as {step.why}" for step in self.steps)
            requested, runs = self.requested.name, self.mode.name
            logger.warning("mode %s runs as %s: %s", requested, runs, "; ".join(why))

    def refuse_steps(self) -> None:
        """Raise `ModeNotSupportedError` if the mode that runs is not the requested one, unless
        `GRAPHRT_MODE` has turned graphs off: that must work everywhere."""
        for step in self.steps:
            if step.rule == SWITCHED_OFF:
                continue
            raise ModeNotSupportedError(
                f"mode {self.requested.name} cannot run here: {step.why}",
                got=step.before.name,
                expected=f"{step.after.name} or lower",
                advice=f"mode={step.after.name!r}, or strict=False to step down",
            )


def resolve_mode(
    requested: GraphMode | str | None,
    *,
    attention: AttentionSupport
    | str
    | Mapping[str, AttentionSupport | str] = AttentionSupport.ALWAYS,
    query_lens: Sequence[int] = (1,),
    pieces: PieceProvider | str | None = PieceProvider.BREAKABLE,
    whole_graph_pass: bool = False,
    pooling: bool = False,
) -> ModeResolution:
    """The mode that a model can run in, by the table of DESIGN section 4.

    `attention` is the model's support, or the support of each of its backends by name, of which
    the lowest decides. `query_lens` are the decode query lengths (the largest matters).
    `whole_graph_pass` says that pieces are off because a compiler pass must see the whole graph.
    """
    backend, support = _lowest(attention)
    provider = None if whole_graph_pass else PieceProvider.parse(pieces)
    query_len = max(query_lens, default=1)
    if requested is None:
        requested = default_mode(pieces=provider is not None, pooling=pooling)
    requested = GraphMode.parse(requested)

    found = ModeResolution(requested, requested)
    who = "attention" if backend is None else f"attention backend {backend!r}"
    full_decode = support >= AttentionSupport.UNIFORM_BATCH or (
        support is AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE and query_len == 1
    )
    if requested.has_full and not full_decode:
        why = f"{who} supports {support.name}, decode has query length {query_len}"
        found = found.stepped("attention-decode", GraphMode.PIECEWISE, why, backend)
    elif requested is GraphMode.FULL and support is not AttentionSupport.ALWAYS:
        why = f"{who} supports {support.name}, so mixed batches cannot be one graph"
        found = found.stepped("attention-mixed", GraphMode.FULL_AND_PIECEWISE, why, backend)
    mode = found.mode
    if whole_graph_pass:
        why = "a pass must see the whole graph, so nothing provides pieces"
        whole = mode is GraphMode.FULL_AND_PIECEWISE and support is AttentionSupport.ALWAYS
        return found.stepped("whole-graph", GraphMode.FULL if whole else mode.without_pieces(), why)
    if provider is None:
        return found.stepped("no-pieces", mode.without_pieces(), "nothing provides pieces")
    return found


def default_mode(*, pieces: bool, pooling: bool = False) -> GraphMode:
    """FULL_AND_PIECEWISE with pieces, else NONE; pooling models PIECEWISE."""
    if pooling:
        return GraphMode.PIECEWISE
    return GraphMode.FULL_AND_PIECEWISE if pieces else GraphMode.NONE


def _lowest(
    attention: AttentionSupport | str | Mapping[str, AttentionSupport | str],
) -> tuple[str | None, AttentionSupport]:
    if isinstance(attention, Mapping):
        levels = {name: AttentionSupport.parse(level) for name, level in attention.items()}
        name = min(levels, key=lambda key: levels[key], default=None)
        return name, AttentionSupport.ALWAYS if name is None else levels[name]
    return None, AttentionSupport.parse(attention)
