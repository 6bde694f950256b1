"""Where random numbers come from, so that several runs can draw the same ones."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

import torch


class Generators:
    """Torch's default generators, of the CPU and of one device, Python's and NumPy's, as they were;
    and those that `note` was told of before they were used."""

    def __init__(self, device_type: str) -> None:
        self._put_back: list[Callable[[], object]] = []
        self._states: list[tuple[Callable[[], Any], Callable[[Any], object]]] = []
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

    def restore(self) -> None:
        """Let all of them go on from where they were."""
        for put_back in self._put_back:
            put_back()

    def now(self) -> Callable[[], None]:
        """What lets all of them go on from where they are now."""
        states = [(put, get()) for get, put in self._states]

        def put_back() -> None:
            for put, state in states:
                put(state)

        return put_back

    def of_torch(self) -> list[torch.Tensor]:
        """The states of torch's generators."""
        states = [get() for get, _ in self._states]
        return [state for state in states if isinstance(state, torch.Tensor)]

    def of_python(self) -> list[bytes]:
        """The states of Python's and NumPy's generators, to be compared."""
        states = [get() for get, _ in self._states]
        return [pickle.dumps(state) for state in states if not isinstance(state, torch.Tensor)]

    def _keep(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        state = get()
        self._states.append((get, put))
        self._put_back.append(lambda: put(state))
