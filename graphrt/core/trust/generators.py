"""Random numbers: where they come from, so that several runs draw the same ones."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from graphrt.core.base.thread_mode import unseen
from graphrt.core.trust.places.slots import call


class Generators:
    """Torch's default generators, of the CPU and of one device, Python's and NumPy's, as they were;
    and those that `note` was told of before they were used."""

    def __init__(self, device_type: str) -> None:
        self._gets: list[Callable[[], Any]] = []
        self._puts: list[Callable[[Any], object]] = []
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
        self._first_noted = len(self._gets)

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

    def note_given(self, values: Iterable[Any]) -> None:
        """Keep the generators among the arguments of an operator."""
        for value in values:
            if isinstance(value, torch.Generator):
                self.note(value)

    def take(self) -> list[Any]:
        """The states now."""
        return [*map(call, self._gets)]

    def have_drawn(self, states: Sequence[Any], since: Sequence[Any] | None = None) -> bool:
        """Whether a run that left these states has drawn other numbers than one that left `since`,
        or any at all."""
        then = self._was if since is None else since
        return unseen(lambda: not all(map(_same_state, then, states)))

    def torch_has_drawn(self) -> bool:
        """Whether torch's generator of the host has drawn since, or one that was noted."""
        places = (0, *range(self._first_noted, len(self._gets)))
        return unseen(
            lambda: any(not _same_state(self._was[at], self._gets[at]()) for at in places)
        )

    def restore(self, states: Sequence[Any] | None = None) -> None:
        """Let all of them go on from where they were at first, or from what `take` returned."""
        for put, state in zip(self._puts, self._was if states is None else states, strict=False):
            put(state)

    def _keep(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self._gets.append(get)
        self._puts.append(put)
        self._was.append(get())


def _same_state(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    # Python's is a tuple, and NumPy's have an array in it.
    return pickle.dumps(ours) == pickle.dumps(theirs)
