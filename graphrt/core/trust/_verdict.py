"""What came of a trial, and which operator mixes rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphrt.core.base.errors import VerificationError
from graphrt.core.trust.watching.trace import first_difference
from graphrt.core.trust.watching.watch import Watch


@dataclass
class Verdict:
    """What came of a trial."""

    outputs: Any = None
    """Of the last run, which was eager and whose effects remain."""
    failure: VerificationError | None = None
    deterministic: bool = True
    asks: bool = False
    """Whether the forward does something else where gradients or inference mode are on or off."""
    notes: list[str] = field(default_factory=list)
    harmless: tuple[str, ...] = ()
    """Python numbers that were moved further, and no operator is another one then."""
    padded_state: tuple[str, ...] = ()
    """Where padded steps leave other Python values, on which no output depends."""


def mixing(padded: Watch, alone: Watch, rounding: float) -> str:
    """The first operator whose live rows are not what they are without padding, in words."""
    if [op.func for op in padded.trace] != [op.func for op in alone.trace]:
        found = first_difference(padded.trace, alone.trace, same_size=False)
        place = len(padded.trace) if found is None else found[0]
    else:
        place = len(padded.trace)
    for index, (ours, theirs) in enumerate(zip(padded.sums, alone.sums, strict=False)):
        if index >= place:
            break
        if ours is None or theirs is None:
            continue
        a, b = ours.item(), theirs.item()
        if abs(a - b) > rounding * max(abs(a), abs(b)) or (a != a) != (b != b):
            place = index
            break
    if place >= len(padded.trace):
        return ""
    source = padded.sources.get(place)
    at = "" if source is None else f" at {source}"
    return f"\n    the first operator that mixes rows is {padded.trace[place]}{at}"
