"""How a requested mode becomes the one that runs, step by step (docs/concepts/modes.md).

Attention may support less than was asked for, nothing may provide pieces, a compiled module of the
forward may be without graphs, and `GRAPHRT_MODE=NONE` turns all of them off.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphrt.core.base.errors import InvalidModeError, InvalidOptionError
from graphrt.core.base.log import logger
from graphrt.core.base.option_values import items_of, refused
from graphrt.core.base.texts import printable
from graphrt.core.batch.modes import AttentionSupport, GraphMode, Mode, PieceProvider, graphs_off
from graphrt.core.plan.sizes import QueryLens, lengths_of

Attention = AttentionSupport | str | Mapping[str, AttentionSupport | str]
"""What the attention of a model supports, or each backend of it by name."""
UNNAMED = "attention"
"""The name of an attention backend that nobody named."""
AUTO = "auto"
"""As `pieces=`: those of a compiled module, else breakable capture."""
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
    """The mode that runs, the ordered steps that led to it, and what cuts a forward into pieces."""

    requested: GraphMode
    mode: GraphMode
    steps: tuple[ResolutionStep, ...] = ()
    pieces: PieceProvider | None = None

    def stepped(
        self, rule: str, after: GraphMode, why: str, backend: str | None = None
    ) -> ModeResolution:
        """The resolution with one more step; itself where the mode is that already."""
        if after is self.mode:
            return self
        step = ResolutionStep(rule, self.mode, after, why, backend)
        return replace(self, mode=after, steps=(*self.steps, step))

    def lines(self) -> list[str]:
        """The mode that runs, and every step on the way to it."""
        return [
            f"Mode: {self.requested.name} requested, {self.mode.name} runs",
            *(f"  {s.rule}: {s.before.name} becomes {s.after.name}: {s.why}" for s in self.steps),
        ]

    def log_steps(self) -> None:
        """Say in the log, in one line, that the mode that runs is not the requested one."""
        if self.steps:
            why = (f"{step.before.name} to {step.after.name}, as {step.why}" for step in self.steps)
            requested, runs = self.requested.name, self.mode.name
            logger.warning("mode %s runs as %s: %s", requested, runs, printable("; ".join(why)))

    def refuse_steps(self) -> None:
        """Raise `InvalidModeError` if the mode that runs is not the requested one, unless
        `GRAPHRT_MODE` has turned graphs off: that must work everywhere."""
        for step in self.steps:
            if step.rule == SWITCHED_OFF:
                continue
            raise InvalidModeError(
                f"mode {self.requested.name} cannot run here: {step.why}",
                got=step.before.name,
                expected=f"{step.after.name} or lower",
                advice=f"mode={step.after.name!r}, or strict=False to step down",
            )


def resolve_mode(
    mode: Mode | None = None,
    *,
    attention: Attention = AttentionSupport.ALWAYS,
    query_lens: QueryLens = (1,),
    pieces: PieceProvider | str | None = AUTO,
    compiled: Sequence[Any] = (),
    **_: object,
) -> ModeResolution:
    """The mode that a model can run in, by the table of docs/concepts/modes.md; takes the checked
    arguments of a plan. Without a `mode` it is FULL_AND_PIECEWISE with pieces, else NONE.

    `attention` is the model's support, or the support of each of its backends by name, of which
    the lowest decides. `query_lens` are the decode query lengths (the largest matters). `compiled`
    are the compiled modules of the forward: of one that must see the whole graph there are no
    pieces.
    """
    whole = any(module.whole_graph for module in compiled)
    provider = None if whole else provider_of(compiled, pieces)
    if mode is None:
        mode = GraphMode.NONE if provider is None else GraphMode.FULL_AND_PIECEWISE
    requested = GraphMode.parse(mode)
    levels = levels_of(attention) or {UNNAMED: AttentionSupport.ALWAYS}
    resolution = ModeResolution(requested, requested, pieces=provider)
    resolution = _with_attention(resolution, levels, max(lengths_of(query_lens)))
    mode, without = resolution.mode, resolution.mode.without_pieces()
    if whole:
        always = min(levels.values()) is AttentionSupport.ALWAYS
        if mode is GraphMode.FULL_AND_PIECEWISE and always:
            without = GraphMode.FULL
        why = "a pass must see the whole graph, so nothing provides pieces"
        resolution = resolution.stepped("whole-graph", without, why)
    elif provider is None:
        resolution = resolution.stepped("no-pieces", without, "nothing provides pieces")
    if not all(module.graphs for module in compiled):
        why = "a module of the forward was compiled with graphs=False"
        resolution = resolution.stepped("graphs-off", GraphMode.NONE, why)
    if graphs_off():
        return resolution.stepped(SWITCHED_OFF, GraphMode.NONE, "GRAPHRT_MODE=NONE is set")
    return resolution


def _with_attention(
    resolution: ModeResolution, levels: Mapping[str, AttentionSupport], query_len: int
) -> ModeResolution:
    """The mode that attention allows, where decode has so many tokens a request."""
    lowest = min(levels, key=lambda name: levels[name])
    support, requested = levels[lowest], resolution.mode
    backend = None if lowest == UNNAMED else lowest
    who = "attention" if backend is None else f"attention backend {backend!r}"
    single = support is AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE and query_len == 1
    if requested.has_full and not (single or support >= AttentionSupport.UNIFORM_BATCH):
        why = f"{who} supports {support.name}, decode has query length {query_len}"
        return resolution.stepped("attention-decode", GraphMode.PIECEWISE, why, backend)
    if requested is GraphMode.FULL and support is not AttentionSupport.ALWAYS:
        why = f"{who} supports {support.name}, so mixed batches cannot be one graph"
        both = GraphMode.FULL_AND_PIECEWISE
        return resolution.stepped("attention-mixed", both, why, backend)
    return resolution


def levels_of(attention: Attention) -> dict[str, AttentionSupport]:
    """The level of each attention backend by its name; raises `InvalidOptionError`."""
    named = attention if isinstance(attention, Mapping) else {UNNAMED: attention}
    for name in named:
        if not isinstance(name, str):
            expected = "a dict of names and levels"
            advice = 'attention={"flash": AttentionSupport.UNIFORM_BATCH}'
            raise refused("attention backends are named by strings", name, expected, advice)
    return {name: AttentionSupport.parse(level) for name, level in named.items()}


# Compiled modules of a forward, as far as a plan must know them before anything is captured ------

_FACTS = ("graphs", "provides", "whole_graph")
"""The attributes of a compiled module: whether its steps may be replayed from graphs at all; what
cuts it into pieces, None where nothing captures them; and whether it must stay one piece, so that
nothing else may cut it either."""


def compiled_in(value: Any) -> list[Any]:
    """The compiled modules that `value` is, or that it holds as a module; none for other functions.

    A module holds one where `graphrt.compile` put it: in itself, or in a module inside of it.
    """
    if _is_compiled(value):
        return [value]
    if not isinstance(value, torch.nn.Module):
        return []
    inner = (getattr(module, "_compiled_call_impl", None) for module in value.modules())
    return [each for each in inner if _is_compiled(each)]


def all_compiled(announced: Iterable[Any]) -> tuple[Any, ...]:
    """The compiled modules in `compiled=[...]`, each once; raises `InvalidOptionError` for a value
    that has none."""
    compiled: dict[int, Any] = {}
    for value in items_of("compiled", announced, "[graphrt.compile(module, ...)]"):
        modules = compiled_in(value)
        if not modules:
            what = "a value in compiled= is no compiled module, nor does it hold one"
            expected = "what graphrt.compile returned, or a module that was compiled in place"
            raise refused(what, value, expected, "compiled=[graphrt.compile(module, ...)]")
        compiled.update((id(module), module) for module in modules)
    return tuple(compiled.values())


def provider_of(modules: Sequence[Any], asked: PieceProvider | str | None) -> PieceProvider | None:
    """What cuts a forward with these modules into pieces. Raises `InvalidOptionError` for breakable
    capture of modules whose pieces are captured one by one."""
    brought = next((module.provides for module in modules if module.provides is not None), None)
    if asked == AUTO:
        return brought or PieceProvider.BREAKABLE
    provider = PieceProvider.parse(asked)
    if brought is not None and provider is PieceProvider.BREAKABLE:
        raise InvalidOptionError(
            "the compiled module captures its own pieces, so a breakable capture cannot",
            got='pieces="breakable"',
            expected=f'pieces="{brought.value}"',
            advice='pieces="auto", or compile without pool= for breakable capture',
        )
    return provider


def _is_compiled(value: Any) -> bool:
    # The class is asked: an object may make up any attribute, as a mock does, or act when asked.
    return all(hasattr(type(value), name) for name in _FACTS)
