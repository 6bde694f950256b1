"""Which sizes are worth most: what leaving one out would add in padding."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping

from graphrt.core.base.option_values import count_of, number_of, refused

Traffic = Mapping[int, float]
"""Shares of the steps by their live batch size in tokens; they need not add up to 1."""

Share = Callable[[int], float]
"""The share of all steps whose batch is not larger than so many tokens."""


def by_worth(
    sizes: Iterable[int], traffic: Traffic | None = None, landmarks: Collection[int] = ()
) -> tuple[int, ...]:
    """`sizes` in tokens, the most valuable first.

    The largest comes first (without it the largest batches run eagerly). The others follow so that
    what is left after any cut adds little padding: what a size saves is the share of the steps that
    it serves, times the tokens to the next larger size. Without `traffic` every doubling of the
    batch is as likely as the next; then the smallest and those of `landmarks`, largest first, come
    before the others.
    """
    kept = sorted(set(sizes))
    # The sizes that come first, in their order.
    fixed = dict.fromkeys(kept[-1:])
    shares: list[Share] = [_even]
    if traffic is None:
        present = sorted(set(landmarks).intersection(kept), reverse=True)
        fixed |= dict.fromkeys([*kept[:1], *present])
    else:
        # Sizes that save equally much of this traffic are ranked as under an even one.
        shares.insert(0, _cumulative(traffic))
    return (*fixed, *reversed(_by_savings(kept, fixed, shares)))


def fitted_sizes(default: tuple[int, ...], traffic: Traffic, multiple: int = 1) -> tuple[int, ...]:
    """Sizes that pad the batches of `traffic` little: as many as `default` has, up to its largest,
    and all multiples of `multiple`."""
    largest = max(default, default=0)
    live = [-(-size // multiple) * multiple for size, share in traffic.items() if share > 0]
    candidates = {*default, *(min(size, largest) for size in live)}
    return tuple(sorted(by_worth(candidates, traffic)[: len(default)]))


def check_traffic(traffic: Traffic) -> dict[int, float]:
    """Traffic as a dict of numbers; raises `InvalidOptionError` if it cannot weigh sizes."""
    cause = None
    try:
        shares = {
            count_of("a size", size, least=1): number_of(f"traffic[{size}]", share, "a share")
            for size, share in dict(traffic).items()
        }
        if any(shares.values()) and max(shares.values()) < 1e300:
            return shares
    except (TypeError, ValueError) as error:
        cause = error
    what = "traffic does not say how often batches of a size occur"
    expected = "positive sizes in tokens, shares >= 0, one of them above 0"
    raise refused(what, traffic, expected, "traffic={1: 0.5, 64: 0.5}") from cause


def _by_savings(kept: list[int], fixed: Collection[int], shares: list[Share]) -> list[int]:
    """`kept`, which ascends, without `fixed`, in the order in which to leave sizes out: each time
    the one that saves least among those that are left."""
    # size -> the share of the steps up to it, by each of `shares`; the next larger and the next
    # smaller size that is not left out yet.
    up_to = {size: tuple(share(size) for share in shares) for size in (0, *kept)}
    after = dict(itertools.pairwise((0, *kept)))
    before = {high: low for low, high in after.items()}

    def savings(size: int) -> tuple[float, ...]:
        pairs = zip(up_to[size], up_to[before[size]], strict=True)
        return tuple((share - less) * (after[size] - size) for share, less in pairs)

    current = {size: savings(size) for size in kept if size not in fixed}
    # Of equal savings the smaller size goes first. Outdated entries stay in the heap, and are
    # skipped when they come up.
    heap = [(saved, size) for size, saved in current.items()]
    heapq.heapify(heap)
    order: list[int] = []
    while heap:
        saved, size = heapq.heappop(heap)
        if current.get(size) != saved:
            continue
        del current[size]
        order.append(size)
        low, high = before[size], after[size]
        after[low], before[high] = high, low
        for neighbour in (low, high):
            if neighbour in current:
                current[neighbour] = savings(neighbour)
                heapq.heappush(heap, (current[neighbour], neighbour))
    return order


def _even(size: int) -> float:
    """Nearly the harmonic number: a batch of n tokens has the weight 1/n."""
    return math.log(size + 0.5)


def _cumulative(traffic: Traffic) -> Share:
    """The share of the steps of `traffic` up to each size."""
    sizes = sorted(traffic)
    sums = [0.0, *itertools.accumulate(float(traffic[size]) for size in sizes)]
    return lambda size: sums[bisect_right(sizes, size)]
