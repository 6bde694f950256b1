"""The state of a forward: taken once, put back after every run, and compared between runs.

1. `StateSnapshot(...)` takes what is declared and the generators; `reach` takes Python values.
   Memory is taken by watches, each piece before its first write.
2. `restore` puts all of it back, any number of times; `restore_memory` what a replay reads.
3. `take` keeps what a run has left, and `restore` brings that back; `PythonState.diff` and
   `SavedWrites.spoilt` compare two.

Each part has `take() -> values` and `restore(values)`, where None are the values of the beginning.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from graphrt.core.base.errors import StateTooLargeError
from graphrt.core.capture.state import State, as_states
from graphrt.core.trust.generators import Generators
from graphrt.core.trust.places.walk import Places
from graphrt.core.trust.python_state import PythonState
from graphrt.core.trust.watching.writes import SavedWrites


class Left(NamedTuple):
    """What a run has left."""

    memory: list[torch.Tensor]
    python: list[Any]
    generators: list[Any]


class StateSnapshot:
    """The state of a forward as it was; runs save in `memory` what they write."""

    python: PythonState
    """Once `reach` was called."""

    def __init__(
        self,
        device_type: str,
        limit_bytes: int,
        *,
        declared: Iterable[State | torch.Tensor] = (),
        sums: bool = True,
    ) -> None:
        """Raises `StateTooLargeError` if what is declared takes more than `limit_bytes`; nothing is
        saved then."""
        states = as_states(declared)
        total = sum(state.bytes for state in states)
        if total > limit_bytes:
            raise StateTooLargeError(
                "saving the declared state takes too much memory",
                got=f"{total} bytes",
                expected=f"at most {limit_bytes} bytes",
                advice="do not declare a KV cache: pad its index inputs to a dummy page. Else "
                "declare what changes: State(tensor, rows=...) or State(save=..., restore=...), "
                "or raise state_limit_bytes",
            )
        self._declared = [state.save() for state in states]
        self.memory = SavedWrites(limit_bytes, sums=sums)
        self.generators = Generators(device_type)

    def reach(self, places: Places) -> None:
        """Take what the Python side of the forward holds."""
        for generator in places.generators:
            self.generators.note(generator)
        self.python = PythonState(places)

    def take(self) -> Left:
        """What is there now, out of the reach of later runs; not what is declared."""
        return Left(self.memory.take(), self.python.take(), self.generators.take())

    def restore(self, left: Left | None = None) -> None:
        """Put back what was there at first, or what a run has left."""
        memory, python, generators = (None, None, None) if left is None else left
        self.memory.restore(memory)
        self.generators.restore(generators)
        self.python.restore(python)

    def restore_memory(self) -> None:
        """Put back what tensors held, and what is declared; the first error of the host's own
        functions is raised when all is done."""
        failed: Exception | None = None
        for restore in (*self._declared, self.memory.restore):
            try:
                restore()
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed
