"""State that a forward advances: what warm-up and capture must leave as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

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


def saved(states: Iterable[State | torch.Tensor], limit_bytes: int) -> list[Callable[[], None]]:
    """Save declared states now; returns for each a function that restores it. Raises
    `StateTooLargeError` if they take more than `limit_bytes`; then nothing is saved."""
    declared = as_states(states)
    total = sum(state.bytes for state in declared)
    if total > limit_bytes:
        raise too_large("the declared state", f"{total} bytes", limit_bytes)
    return [state.save() for state in declared]


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
