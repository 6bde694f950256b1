"""A plan for people, line by line."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import AttentionSupport, GraphMode
from graphrt.core.plan.budget import (
    BUDGET_RULE,
    RESOURCES,
    Fitted,
    GraphCost,
    LeftOut,
    figure,
    of_limit,
)
from graphrt.core.plan.resolution import UNNAMED, ModeResolution
from graphrt.core.plan.sizes import CaptureKey, CaptureSizes

_WIDTH = 100


def mode_lines(
    resolution: ModeResolution, attention: Mapping[str, AttentionSupport]
) -> Iterator[str]:
    """The mode, every step on the way to it, and what attention supports."""
    yield f"Mode: {resolution.requested.name} requested, {resolution.mode.name} runs"
    for step in resolution.steps:
        yield f"  {step.rule}: {step.before.name} becomes {step.after.name}: {step.why}"
    for name, support in attention.items():
        yield f"Attention: {'' if name == UNNAMED else f'{name} supports '}{support.name}"


def size_lines(sizes: CaptureSizes, mode: GraphMode) -> Iterator[str]:
    """The lists of sizes that `mode` captures, in tokens, with how many there are."""
    yield f"Sizes, at most {sizes.limit} tokens:"
    if mode is GraphMode.FULL:
        lists = {"any batch": sizes.general}
    else:
        lists = {"mixed": sizes.mixed}
        lists |= {f"decode, query length {q}": ladder for q, ladder in sizes.decode.items()}
    width = max(map(len, lists))
    for name, listed in lists.items():
        head = f"  {name:{width}} {len(listed):4}: "
        text = " ".join(map(str, listed)) or "none"
        yield textwrap.fill(text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))


def graph_line(keys: Iterable[CaptureKey]) -> str:
    """How many graphs of each mode are captured."""
    counts = Counter(mode.name for mode, _ in keys)
    total = ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
    return f"Graphs to capture, largest first: {sum(counts.values())} ({total})"


def eager_decode(
    sizes: CaptureSizes,
    keys: Collection[CaptureKey],
    remedy: Callable[[int, int], str | None],
) -> list[str]:
    """Decode batches that will be TOO_LARGE for every graph that may serve them, as sentences;
    `remedy` says what would capture a query length up to so many tokens."""
    found = []
    for query_len in sizes.decode if keys else ():
        first, most = eager_range(sizes, keys, query_len)
        if first <= most:
            others = f"; {help} captures them" if (help := remedy(query_len, most)) else ""
            found.append(
                f"decode batches of {first} to {most} tokens (query length {query_len}) will run "
                f"eagerly{others}"
            )
    return found


def eager_range(sizes: CaptureSizes, keys: Iterable[CaptureKey], query_len: int) -> tuple[int, int]:
    """The first and the last size, in whole requests, that no graph has room for; the first is
    larger than the last where there is none."""
    named = [descriptor for _, descriptor in keys]
    largest = max(
        (each.num_tokens for each in named if not each.uniform or each.query_len == query_len),
        default=0,
    )
    most = min(sizes.max_num_reqs, sizes.max_num_tokens // query_len)
    return (largest // query_len + 1) * query_len, most * query_len


def budget_lines(fitted: Fitted) -> tuple[str, ...]:
    """Every graph with its cost, the sum, and what was left out."""
    shown = _shown(fitted)
    budget, total = fitted.budget, fitted.total
    lines = [*budget.notes]
    lines += [f"{p.mode.name} [{p.descriptor}]: {_figures(p.cost, shown)}" for p in fitted.captured]
    counted = f"{len(fitted.captured)} of {len(fitted.captured) + len(fitted.left_out)} sizes"
    limits = [
        of_limit(name, getattr(total, name), limit)
        for name in shown
        if (limit := getattr(budget, name)) is not None
    ]
    lines.append(f"in all: {counted}, {', '.join(limits) or _figures(total, shown)}")
    lines += _left_out_lines(fitted.left_out)
    lines += [
        f"mode {step.before.name} becomes {step.after.name}: {step.why}"
        for step in fitted.resolution.steps
        if step.rule == BUDGET_RULE
    ]
    return tuple(lines)


def _shown(fitted: Fitted) -> list[str]:
    return [
        name
        for name in RESOURCES
        if getattr(fitted.budget, name) is not None
        or (name != "graphs" and getattr(fitted.total, name))
    ] or ["graphs"]


def _figures(cost: GraphCost, names: Iterable[str]) -> str:
    return ", ".join(figure(name, getattr(cost, name)) for name in names)


def _left_out_lines(left_out: Iterable[LeftOut]) -> list[str]:
    """A line for each reason: the largest of its graphs, and how many more there are."""
    by_reason: dict[tuple[str, str, bool], list[LeftOut]] = {}
    for each in left_out:
        reason = each.mode.name, each.why, each.padded_to is None
        by_reason.setdefault(reason, []).append(each)
    lines = []
    for first, *others in by_reason.values():
        size = first.padded_to
        served = "no graph of its kind serves its batches" if size is None else f"padded to {size}"
        more = f"; {alike(each.descriptor for each in others)}" if others else ""
        lines.append(
            f"left out: {first.mode.name} [{first.descriptor}]: {first.why}; {served}{more}"
        )
    return lines


def alike(descriptors: Iterable[BatchDescriptor]) -> str:
    """How many graphs share a reason with one that was named, and of which sizes."""
    sizes = [descriptor.num_tokens for descriptor in descriptors]
    least, most = min(sizes), max(sizes)
    tokens = f"{most} tokens" if least == most else f"{least} to {most} tokens"
    return f"so {'is' if len(sizes) == 1 else 'are'} {len(sizes)} more of {tokens}"
