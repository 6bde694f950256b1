"""State that a forward advances: what warm-up and capture must leave as it was.

`SavedState` is the one owner of what a host declares, and of generators of random numbers. Trust
adds to it what it has seen a forward write.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from graphrt.core.base._undo import Undo
from graphrt.core.base.errors import InvalidOptionError, StaleInputError, StateTooLargeError
from graphrt.core.base.option_values import check_kind, check_takes, shown
from graphrt.core.base.thread_mode import without_gradients
from graphrt.core.base.torch_names import inference_guard
from graphrt.core.capture.refusals import described


class State:
    """One piece of state: a tensor, such as some rows of a cache, or the host's own way to save it.

    `State(cache[:4])` or `State(save=..., restore=...)`, where `restore` is called with what `save`
    returned, as often as needed. Raises `InvalidOptionError` for neither or both.
    """

    def __init__(
        self,
        tensor: torch.Tensor | None = None,
        *,
        save: Callable[[], Any] | None = None,
        restore: Callable[[Any], None] | None = None,
    ) -> None:
        if (tensor is None) == (save is None) or (save is None) != (restore is None):
            raise InvalidOptionError(
                "state is either a tensor or a pair of functions",
                got=f"tensor={tensor is not None}, save={shown(save)}, restore={shown(restore)}",
                expected="State(tensor) or State(save=..., restore=...)",
                advice="State(tensor) of a tensor that the forward writes in place",
            )
        check_kind("tensor", tensor, torch.Tensor)
        check_takes("save", save, "save()", optional=True)
        check_takes("restore", restore, "restore(saved)", optional=True)
        self.tensor = tensor
        """The tensor that is saved; None for the host's own functions."""
        self._save = save
        self._restore = restore

    @property
    def bytes(self) -> int:
        """Bytes that saving takes; 0 for the host's own functions."""
        return 0 if self.tensor is None else self.tensor.nbytes

    def save(self) -> Callable[[], None]:
        """Save it now; the returned function restores it, any number of times."""
        if self._save is not None and self._restore is not None:
            saved, restore = self._save(), self._restore
            return lambda: restore(saved)
        tensor = self.tensor
        assert tensor is not None
        copy, original = without_gradients(tensor.clone), tensor.detach()

        def write() -> None:
            with inference_guard(tensor.is_inference()):
                original.copy_(copy)

        def restore_tensor() -> None:
            without_gradients(write)
            if tensor.data_ptr() != original.data_ptr() or tensor.shape != original.shape:
                tensor.data = original
                raise StaleInputError(
                    "the forward gave declared state other memory, or another shape: replays would "
                    "go on from the old one",
                    got=described(tensor),
                    expected="state that is written in place: copy_(), add_(), index_copy_()",
                    advice="write the new value into the tensor instead of replacing it",
                )

        return restore_tensor


def as_states(states: Iterable[State | torch.Tensor]) -> Sequence[State]:
    """The states, with tensors among them wrapped as `State`."""
    return [state if isinstance(state, State) else State(state) for state in states]


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

    def host_has_drawn(self) -> bool:
        """Whether torch's own of the CPU has another state than at the beginning."""
        return not torch.equal(self._saved[0][2], torch.get_rng_state())

    def _save(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self._saved.append((get, put, get()))


class SavedState:
    """Declared state and random generators as they are now, to be put back after runs."""

    generators_of: type[Generators] = Generators

    def __init__(
        self, device_type: str, limit_bytes: int, declared: Iterable[State | torch.Tensor] = ()
    ) -> None:
        """Raises `StateTooLargeError` if declared state takes more than `limit_bytes`; then nothing
        is saved."""
        self._states, self._limit_bytes = as_states(declared), limit_bytes
        # For each declared state a function that puts it back.
        self._declared = self.copies()
        self.generators = self.generators_of(device_type)

    def copies(self) -> list[Callable[[], None]]:
        """Save declared state as it is now; returns for each a function that restores it."""
        total = sum(state.bytes for state in self._states)
        if total > self._limit_bytes:
            raise too_large("the declared state", f"{total} bytes", self._limit_bytes)
        return [state.save() for state in self._states]

    def restore_memory(self, *more: Callable[[], object]) -> None:
        """Put back declared state, then do `more`. The first error of the host's own functions is
        raised when all is done."""
        Undo([*more, *reversed(self._declared)]).now()


def too_large(state: str, got: str, limit_bytes: int) -> StateTooLargeError:
    """The error for state that takes more memory than it may."""
    return StateTooLargeError(
        f"saving {state} takes too much memory",
        got=got,
        expected=f"at most {limit_bytes} bytes",
        advice="pad the index inputs of a KV cache to a dummy page; or declare what changes, and "
        "no cache: Host(state=[State(cache[:4])]) or State(save=..., restore=...); or "
        "raise state_limit_bytes",
    )
