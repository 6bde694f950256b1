"""Tensors that a forward makes of Python data: a graph has those of its capture for ever."""

from __future__ import annotations

from graphrt.core.base.errors import BakedScalarError
from graphrt.core.trust.watching.trace import Trace
from graphrt.core.trust.watching.watch import LIFT_FRESH, Watch


def baked(name: str, now: Watch, then: Trace, *, has_parts: bool) -> BakedScalarError | None:
    """That `now` made such a tensor of other values than an earlier run of the same size, and used
    it; None where it did not. With `has_parts` those of eager parts do not count."""
    for place, (ours, theirs) in enumerate(zip(now.trace, then, strict=False)):
        if ours.func is not theirs.func:
            return None
        if ours.func is not LIFT_FRESH or ours.arguments == theirs.arguments:
            continue
        if place not in now.constants or (has_parts and place in now.constants_of_parts):
            continue
        source = now.sources.get(place)
        return BakedScalarError(
            f"{name}: the forward makes a tensor of Python data, which is other data now; a graph "
            "has that of its capture for ever",
            got=f"{ours.arguments[0]}" + ("" if source is None else f", at {source}"),
            expected=f"{theirs.arguments[0]}, as before",
            advice="keep what changes in a tensor on the device and write it in place (fill_, "
            "copy_), or pass it as an input; recapture() after the host has changed it for good",
        )
    return None
