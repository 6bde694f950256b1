"""What two engines said of the same tokens, compared: log-probabilities of the best candidates."""

from typing import Any

Candidates = list[tuple[int, float]]
"""A token and its log-probability, of each candidate; the one that was taken comes first."""


def difference(
    mine: dict[str, list[Candidates]], theirs: dict[str, list[Candidates]]
) -> dict[str, Any]:
    """How far the first is from the second, over all tokens that both have, by request.

    `apart` are the differences of log-probabilities. Of tokens whose best candidate is another one
    `gap` is how much better the second engine's best was there than the candidate of the first:
    a near tie has a gap of rounding.
    """
    apart: list[float] = []
    gaps: list[float] = []
    count = 0
    for name in mine.keys() & theirs.keys():
        for my, other in zip(mine[name], theirs[name], strict=False):
            ours, expected = dict(map(tuple, my)), dict(map(tuple, other))
            count += 1
            apart += [abs(ours[token] - expected[token]) for token in ours.keys() & expected.keys()]
            best, right = max(ours, key=ours.__getitem__), max(expected, key=expected.__getitem__)
            if best != right:
                # A candidate that is none of the other's is at least as bad as its worst.
                worst = min(expected.values())
                gaps.append(expected[right] - expected.get(best, worst))
    apart.sort()
    return {
        "tokens": count,
        "compared": len(apart),
        "median": apart and round(apart[len(apart) // 2], 4),
        "p99": apart and round(apart[int(len(apart) * 0.99)], 4),
        "max": apart and round(apart[-1], 4),
        "other_best": round(len(gaps) / max(count, 1), 5),
        "largest_gap": round(max(gaps, default=0.0), 4),
    }


def same_share(mine: list[Any], theirs: list[Any]) -> float:
    """The share of equal entries, in their order."""
    return round(sum(a == b for a, b in zip(mine, theirs, strict=False)) / max(len(theirs), 1), 4)
