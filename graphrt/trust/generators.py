"""What runs have drawn of random numbers, by the states of generators."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from typing import Any

import torch

from graphrt.core.base.thread_mode import unseen
from graphrt.core.capture.state import Generators


class WatchedGenerators(Generators):
    """`Generators`, with those that `note` was given before their first use."""

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        # The forward's own generators among them.
        self._noted: list[Any] = []

    def note(self, generator: Any) -> None:
        """Save the state of a generator that the forward has itself, unless it is saved already."""
        # Torch hands its generators to a dispatch mode in new Python objects.
        at = getattr(generator, "_cdata", id(generator))
        if any(at == getattr(each, "_cdata", id(each)) for each in self._noted):
            return
        self._noted.append(generator)
        if isinstance(generator, random.Random):
            self._save(generator.getstate, generator.setstate)
        elif hasattr(generator, "bit_generator"):
            bits = generator.bit_generator
            self._save(lambda: bits.state, lambda state: setattr(bits, "state", state))
        else:
            self._save(generator.get_state, generator.set_state)

    def have_drawn(self, states: Sequence[Any], since: Sequence[Any] | None = None) -> bool:
        """Whether a run that left these states has drawn other numbers than one that left `since`;
        without `since`, whether it has drawn any."""
        before = [was for *_, was in self._saved] if since is None else since
        return unseen(lambda: not all(map(_same_state, before, states)))

    def are_reset(
        self,
        left: Sequence[Any],
        replayed: Sequence[Any],
        later: Sequence[Any],
        since: Sequence[Any] | None = None,
    ) -> bool:
        """Whether a forward seems to seed a generator of torch's, or to put its state back: a
        replay has drawn from one, but the run that `left` these states has moved it nowhere, or to
        the state in which a run that began there ended `later`. All began with the states `since`,
        by default with those that were saved."""

        def is_reset(at: int, was: Any) -> bool:
            if not isinstance(was, torch.Tensor) or _same_state(was, replayed[at]):
                return False
            is_put_back = _same_state(was, left[at])
            return is_put_back or (at < len(later) and _same_state(left[at], later[at]))

        before = [was for *_, was in self._saved] if since is None else since
        count = min(len(left), len(replayed), len(before))
        return unseen(lambda: any(is_reset(at, before[at]) for at in range(count)))


def _same_state(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    # Python's is a tuple, and NumPy's have an array in it.
    return pickle.dumps(ours) == pickle.dumps(theirs)
