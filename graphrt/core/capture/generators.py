"""The states of random generators, to put them back after runs that draw."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Generators:
    """The states of random generators: torch's default ones of the CPU and of one device, Python's
    and NumPy's."""

    def __init__(self, device_type: str) -> None:
        # For each generator: what reads its state, what sets it, and its state at the beginning.
        self._saved: list[tuple[Callable[[], Any], Callable[[Any], object], Any]] = []
        self._save(torch.get_rng_state, torch.set_rng_state)
        if device_type != "cpu":
            device = torch.get_device_module(device_type)
            if hasattr(device, "get_rng_state"):
                self._save(device.get_rng_state, device.set_rng_state)
        self._save(random.getstate, random.setstate)
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            self._save(numpy.get_state, numpy.set_state)

    def take(self) -> list[Any]:
        """The states at this moment."""
        return [get() for get, *_ in self._saved]

    def restore(self, states: Sequence[Any] | None = None) -> None:
        """Put back the states of the beginning, or those that `take` returned."""
        for at, (_, put, was) in enumerate(self._saved):
            put(states[at] if states is not None and at < len(states) else was)

    def _save(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self._saved.append((get, put, get()))
