"""The Python values that graphs were captured with, and which of them have changed since."""

from __future__ import annotations

from operator import is_
from typing import Any

from graphrt.core.trust.places.slots import same_value
from graphrt.core.trust.places.walk import Places

_MOST_ARRAY_BYTES = 1 << 16


class BakedValues:
    """What a forward reaches in Python beside tensors, as it was when this was made.

    A capture may have baked in any of it: nothing shows which numbers were read. It is looked at
    after eager steps, in one pass, so a value that is the same object costs one look-up.
    """

    def __init__(self, places: Places) -> None:
        found = [*places.numbers, *[place for place, _ in places.objects]]
        self._places = found
        self._getters = [place.getter() for place in found]
        self._values = [get() for get in self._getters]
        self._containers = places.containers
        self._counts = [len(container) for _, container in self._containers]
        self._arrays = [each for each in places.arrays if each[1].nbytes <= _MOST_ARRAY_BYTES]
        self._bytes = [array.tobytes() for _, array in self._arrays]

    def moved(self) -> dict[str, tuple[Any, Any]]:
        """What is not as it was when this was last asked: what it was, and what it is."""
        found: dict[str, tuple[Any, Any]] = {}
        now = [get() for get in self._getters]
        if not all(map(is_, now, self._values)):
            for place, was, value in zip(self._places, self._values, now, strict=True):
                if value is not was and not same_value(was, value):
                    found[place.path] = was, value
            self._values = now
        counts = [len(container) for _, container in self._containers]
        for (place, _), had, count in zip(self._containers, self._counts, counts, strict=True):
            if count != had:
                found[f"len({place.path})"] = had, count
        self._counts = counts
        data = [array.tobytes() for _, array in self._arrays]
        for (place, _), before, after in zip(self._arrays, self._bytes, data, strict=True):
            if before != after:
                found[place.path] = before, after
        self._bytes = data
        return found
