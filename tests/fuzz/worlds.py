"""Two eager runs of a program that is being grown, at different sizes: they tell what a line gives.

A line that raises in one of them, or gives tensors that differ in more than their sizes, is no
line of a program.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from tests.fuzz.program import STATE, STATE_NAMES, WEIGHTS, names_at_hand
from tests.fuzz.values import grad_mode, values_of

SAMPLES = ((5, 2), (7, 3))
_LARGEST = 2048


class Worlds:
    """The values by name in each of the two runs."""

    def __init__(self, specs: dict[str, Any], gradients: str) -> None:
        self._gradients = gradients
        self._worlds: list[dict[str, Any]] = []
        for tokens, reqs in SAMPLES:
            world = {**names_at_hand(), "device": "cpu"}
            for line in (*WEIGHTS, *STATE):
                exec(line.format(grad=gradients == "grad"), world)
            # Of random bits: those that are zeros differ nowhere.
            world |= values_of(specs, tokens, reqs, 0, "cpu")
            self._worlds.append(world)

    def value(self, name: str) -> torch.Tensor:
        return self._worlds[0][name]

    def sizes(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape in each of the runs."""
        first, second = (tuple(world[name].shape) for world in self._worlds)
        return first, second

    def has_rows(self, name: str) -> bool:
        """Whether its first dimension is that of the tokens."""
        first, second = self.sizes(name)
        return bool(first) and (first[0], second[0]) == (SAMPLES[0][0], SAMPLES[1][0])

    def run(self, code: str, names: list[str]) -> bool:
        """Run lines that define tensors of these names; whether they are good."""
        for world in self._worlds:
            try:
                with warnings.catch_warnings(), grad_mode(self._gradients):
                    warnings.simplefilter("ignore")
                    exec(code, world)
            except Exception:
                return False  # of whatever kind: most lines do not fit their values
        return all(self._is_good(name) for name in (*names, *STATE_NAMES))

    def define(self, code: str) -> None:
        """Run lines that are right by themselves."""
        for world in self._worlds:
            exec(code, world)

    def _is_good(self, name: str) -> bool:
        first, second = (world.get(name) for world in self._worlds)
        if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
            return False
        if first.layout is not torch.strided or first.is_quantized:
            return False
        return (
            first.dtype == second.dtype
            and first.dim() == second.dim() <= 4
            and 0 < first.numel() <= _LARGEST
        )
