"""Captures beside a host's steps: which graph is next, and when."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.option_values import number_of, shown
from graphrt.core.dispatch.reasons import Reason
from graphrt.core.plan.sizes import CaptureKey
from graphrt.core.runner.capture_session import CaptureProgress

if TYPE_CHECKING:
    from graphrt.core.runner.graph_table import GraphTable


class Pace:
    """Spreads captures over time: after one of d seconds with a share of 0.1 the next waits 9 d.

    Time without captures is not saved up, so that steps never meet several in a row.
    """

    def __init__(self, graphs: GraphTable) -> None:
        self._graphs = graphs
        self._next_s = 0.0
        # The dispatcher's version, and how far captures were then; whether that came of a call.
        self._known: tuple[object, CaptureProgress, bool] | None = None

    def capture(self, share: float, call: Callable[[], CaptureProgress]) -> CaptureProgress:
        """The result of `call`, which may capture something; or, where it comes too early or
        nothing is left, how far captures are. A host asks after each step."""
        graphs = self._graphs
        version, is_early = graphs.dispatcher.version, time.perf_counter() < self._next_s
        known = self._known
        if is_early and (known is None or known[0] is not version):
            known = self._known = version, progress_now(graphs), False
        if known is not None and known[0] is version and (is_early or (known[2] and not known[1])):
            return known[1]
        _check_share(graphs, share)
        began_s = time.perf_counter()
        try:
            progress = call()
        finally:
            now_s = time.perf_counter()
            self._next_s = now_s + (now_s - began_s) * (1 / share - 1)
        now = progress_now(graphs)
        self._known = graphs.dispatcher.version, now, True
        return replace(now, captured=progress.captured)


def progress_now(graphs: GraphTable) -> CaptureProgress:
    """How far the captures of a runner are."""
    left = graphs.missing(left=True)
    return CaptureProgress((), len(left), {*left}.isdisjoint(ends(graphs.setup.plan.keys)))


def _check_share(graphs: GraphTable, share: float) -> None:
    """Raise `InvalidOptionError` for a share of time that is none, and among ranks."""
    try:
        is_share = 0 < number_of("share", share, "a share of time") <= 1
    except InvalidOptionError:
        is_share = False
    if not is_share:
        raise InvalidOptionError(
            "share= is no share of the time",
            got=shown(share),
            expected="more than 0 and at most 1",
            advice="share=0.1",
        )
    if graphs.setup.host.ranks is not None:
        raise InvalidOptionError(
            "share= cannot be used with ranks: each would choose by its own clock and traffic",
            got=f"share={share} and Host(ranks=)",
            expected="the same capture on all ranks",
            advice="let one rank decide when all call capture_next()",
        )


def ends(keys: Sequence[CaptureKey]) -> list[CaptureKey]:
    """The largest and the smallest graph of each mode. The largest come first, as smaller ones use
    their memory again."""
    modes = dict.fromkeys(mode for mode, _ in keys)
    of_modes = [
        sorted([key for key in keys if key[0] is mode], key=lambda key: -key[1].num_tokens)
        for mode in modes
    ]
    return [of_mode[at] for at in (0, -1) for of_mode in of_modes]


def next_key(graphs: GraphTable, missing: Sequence[CaptureKey]) -> CaptureKey:
    """Which of the missing graphs is captured next beside steps: an end of a mode, then the one
    that most batches would have used, else the first in the order of captures."""
    for key in ends(graphs.setup.plan.keys):
        if key in missing:
            return key
    wanted = _wanted(graphs)
    return max(missing, key=lambda key: wanted[key])


def _wanted(graphs: GraphTable) -> Counter[CaptureKey]:
    """How many batches had the size of each graph, whether a graph served them or none did."""
    ladders: dict[object, dict[int, CaptureKey]] = {}
    for key in sorted(graphs.setup.plan.keys, key=lambda key: key[1].num_tokens):
        ladders.setdefault((key[0], key[1].kind), {}).setdefault(key[1].num_tokens, key)
    wanted = Counter[CaptureKey]()
    for row, batches in graphs.dispatcher.sizes().items():
        if isinstance(row, Reason):
            found = [*ladders.values()] if row is Reason.NOT_CAPTURED else []
        else:
            found = [ladders[row[0], row[1].kind]]
        for ladder in found:
            sizes = [*ladder]
            for tokens, count in batches.items():
                at = bisect_left(sizes, tokens)
                if at < len(sizes):
                    wanted[ladder[sizes[at]]] += count
    return wanted
