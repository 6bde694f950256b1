"""Which sizes are worth most: what leaving one out would add in padding."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import accumulate

from graphrt.core.base import InvalidOptionError

Traffic = Mapping[int, float]
"""Shares of the steps by their live batch size in tokens; they need not add up to 1."""

Share = Callable[[int], float]
"""The share of all steps whose batch is not larger than so many tokens."""

_EULER_GAMMA = 0.5772156649015329


def by_worth(
    sizes: Iterable[int], traffic: Traffic | None = None, landmarks: Collection[int] = ()
) -> tuple[int, ...]:
    """`sizes` in tokens, the most valuable first.

    The largest comes first (without it the largest batches run eagerly), then the smallest, then
    those of `landmarks`, largest first. The others follow so that what is left after any cut adds
    little padding: what a size saves is the share of the steps that it serves, times the tokens to
    the next larger size. Without `traffic` every doubling of the batch is as likely as the next.

    Raises `InvalidOptionError` for traffic that is empty, negative or not of positive sizes.
    """
    kept = sorted(set(sizes))
    fixed = list(dict.fromkeys([*kept[-1:], *kept[:1], *_present(landmarks, kept)]))
    shares: list[Share] = [_even]
    if traffic is not None:
        # Sizes that no traffic tells apart are still ranked by what an even one would need.
        shares.insert(0, _cumulative(check_traffic(traffic)))
    dropped: list[int] = []
    while len(kept) > len(fixed):
        inner = [i for i, size in enumerate(kept) if size not in fixed]
        least = min(inner, key=lambda i: _savings(kept, i, shares))
        dropped.append(kept.pop(least))
    return (*fixed, *reversed(dropped))


def check_traffic(traffic: Traffic) -> Traffic:
    """`traffic` itself; raises `InvalidOptionError` if it cannot weigh sizes."""
    bad = [
        (size, share)
        for size, share in traffic.items()
        if isinstance(size, bool) or not isinstance(size, int) or size < 1 or not 0 <= share < 1e300
    ]
    if bad or not any(traffic.values()):
        raise InvalidOptionError(
            "traffic does not say how often batches of a size occur",
            got=dict(bad) or dict(traffic),
            expected="positive sizes in tokens, shares >= 0, one of them above 0",
            advice="traffic={1: 0.5, 64: 0.5}",
        )
    return traffic


def _present(landmarks: Collection[int], sizes: list[int]) -> list[int]:
    return sorted(set(landmarks).intersection(sizes), reverse=True)


def _savings(kept: list[int], at: int, shares: list[Share]) -> tuple[float, ...]:
    before, size, after = kept[at - 1], kept[at], kept[at + 1]
    return tuple((share(size) - share(before)) * (after - size) for share in shares)


def _even(size: int) -> float:
    """The harmonic number: a batch of n tokens has the weight 1/n."""
    if size < 32:
        return sum(1 / n for n in range(1, size + 1))
    return math.log(size) + _EULER_GAMMA + 1 / (2 * size) - 1 / (12 * size * size)


def _cumulative(traffic: Traffic) -> Share:
    sizes = sorted(traffic)
    sums = [0.0, *accumulate(float(traffic[size]) for size in sizes)]
    return lambda size: sums[bisect_right(sizes, size)]
