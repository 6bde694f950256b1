"""The addresses of parameters that graphs have baked in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from graphrt.core.base import StaleInputError, tree

Parameters = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[torch.Tensor] | None


class AddressBook:
    """Where a model's parameters and buffers were when its graphs were captured."""

    def __init__(self, parameters: Parameters) -> None:
        if parameters is not None and not isinstance(parameters, torch.nn.Module | Mapping):
            # A generator, which model.parameters() is, can be read only once.
            parameters = list(parameters)
        self._parameters = parameters
        self._captured: dict[str, tuple[object, ...]] = {}

    def record(self) -> None:
        """Remember where everything is now."""
        self._captured = self._now()

    def check(self) -> None:
        """Raise `StaleInputError` if something that graphs read has moved."""
        now = self._now()
        moved = [name for name, where in self._captured.items() if now.get(name) != where]
        if moved:
            raise StaleInputError(
                "parameters are not where the captured graphs read them",
                got=f"{len(moved)} moved, {moved[0]!r} among them",
                expected="every parameter at its captured address",
                advice="copy new weights into the old tensors, or call runner.recapture()",
            )

    def _now(self) -> dict[str, tuple[object, ...]]:
        source = self._parameters
        if source is None:
            return {}
        if isinstance(source, torch.nn.Module):
            named = [*source.named_parameters(), *source.named_buffers()]
        elif isinstance(source, Mapping):
            named = list(source.items())
        else:
            named = [(str(index), tensor) for index, tensor in enumerate(source)]
        return {name: tree.identity(tensor) for name, tensor in named}
