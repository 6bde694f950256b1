"""Where random numbers come from, so that several runs can draw the same ones."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Generators:
    """Torch's default generators, of the CPU and of one device, Python's and NumPy's, as they were;
    and those that `note` was told of before they were used."""

    def __init__(self, device_type: str) -> None:
        self._known: list[tuple[Callable[[], Any], Callable[[Any], object]]] = []
        self._was: list[Any] = []
        self._noted: dict[int, Any] = {}
        self._keep(torch.get_rng_state, torch.set_rng_state)
        if device_type != "cpu":
            device = torch.get_device_module(device_type)
            if hasattr(device, "get_rng_state"):
                self._keep(device.get_rng_state, device.set_rng_state)
        self._keep(random.getstate, random.setstate)
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            self._keep(numpy.get_state, numpy.set_state)

    def note(self, generator: Any) -> None:
        """Keep a generator of the forward's own as it is now, unless it is kept already: one of
        torch's, Python's or NumPy's."""
        if id(generator) in self._noted:
            return
        self._noted[id(generator)] = generator
        if isinstance(generator, random.Random):
            self._keep(generator.getstate, generator.setstate)
        elif hasattr(generator, "bit_generator"):
            bits = generator.bit_generator
            self._keep(lambda: bits.state, lambda state: setattr(bits, "state", state))
        else:
            self._keep(generator.get_state, generator.set_state)

    def take(self) -> list[Any]:
        """The states now."""
        return [get() for get, _ in self._known]

    def restore(self, states: Sequence[Any] | None = None) -> None:
        """Let all of them go on from where they were at first, or from what `take` returned."""
        for (_, put), state in zip(
            self._known, self._was if states is None else states, strict=False
        ):
            put(state)

    def _keep(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self._known.append((get, put))
        self._was.append(get())


def of_torch(states: Sequence[Any]) -> list[torch.Tensor]:
    """Those of torch's generators."""
    return [state for state in states if isinstance(state, torch.Tensor)]


def of_python(states: Sequence[Any]) -> list[bytes]:
    """Those of Python's and NumPy's generators, to be compared."""
    return [pickle.dumps(state) for state in states if not isinstance(state, torch.Tensor)]
