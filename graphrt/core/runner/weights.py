"""The weights of a forward by name, and whether they are where they were at capture.

They are known at every level of checks, of modules alone: `forward` is one, a method or a `partial`
of one, or compiled. What graphs read beside them only a watched warm-up shows (`graphrt.trust`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import StaleInputError, UntrackedWeightsError
from graphrt.core.base.texts import listed

Named: TypeAlias = Callable[[], Mapping[str, torch.Tensor]]
"""Returns the weights of a compiled module by name."""


class NamedWeights:
    """The parameters and buffers of a forward's modules: `record` notes where they are, and `moved`
    compares that with now."""

    def __init__(self, forward: Any, compiled: Sequence[Named] = ()) -> None:
        """`compiled` return the named weights of compiled modules."""
        self.compiled = compiled
        self._forward = forward
        # (number of a module, name in it) -> where the tensor of that name was, and the key of its
        # storage.
        self._were: dict[tuple[int, str], tuple[object, int | None]] = {}

    def record(self) -> None:
        """Note where the tensors are: before the first capture."""
        self._were = {
            key: (tree.identity(tensor), tree.storage_key(tensor))
            for key, tensor in self.now().items()
        }

    def moved(self) -> list[tuple[str, int | None]]:
        """The names of tensors that have moved or are gone since `record`, each with the key of the
        storage that it had."""
        now = {key: tree.identity(tensor) for key, tensor in self.now().items()}
        were = self._were.items()
        return [(key[1], storage) for key, (was, storage) in were if now.get(key) != was]

    def refuse_others(self) -> None:
        """Raise `UntrackedWeightsError` unless the forward is made of modules alone: what else it
        reads has no name here."""
        if not _modules_of(self._forward)[1]:
            raise UntrackedWeightsError(
                "whether weights moved cannot be told: the forward is no module, and no warm-up "
                "shows what its graphs read",
                expected="a forward whose weights are known",
                advice='check="capture", or a module or a method of one as the forward',
            )

    def now(self) -> dict[tuple[int, str], torch.Tensor]:
        """(number of a module, name in it) -> the tensor of that name now."""
        modules, _ = _modules_of(self._forward)
        sources = [weights() for weights in self.compiled] + [*map(_tensors, modules)]
        return {
            (index, name): tensor
            for index, source in enumerate(sources)
            for name, tensor in source.items()
        }


def stale(moved: Sequence[str]) -> StaleInputError:
    """The error for tensors of these names."""
    return StaleInputError(
        "tensors were replaced after the capture, and the graphs still read the old ones",
        got=listed(moved),
        expected="the tensors of the capture, with new values in them",
        advice="write new values into the old tensors, as by copy_(), or call recapture()",
    )


def refuse_moved(moved: Sequence[str]) -> None:
    """Raise `StaleInputError` for these names, if there are any."""
    if moved:
        raise stale([*dict.fromkeys(moved)])


def _modules_of(forward: Any) -> tuple[list[torch.nn.Module], bool]:
    """The modules that a forward is made of, and whether it is made of nothing else."""
    if isinstance(forward, torch.nn.Module):
        return [forward], True
    if isinstance(forward, functools.partial):
        modules, complete = _modules_of(forward.func)
        arguments = tree.leaves((forward.args, forward.keywords))
        bound = [value for _, value in arguments if isinstance(value, torch.nn.Module)]
        # A bound tensor is not looked up again: the weight that it was may have been replaced.
        return modules + bound, complete and not tree.tensors(forward.args, forward.keywords)
    if inspect.ismethod(forward) and isinstance(forward.__self__, torch.nn.Module):
        return [forward.__self__], True
    # Wrappers and compiled modules.
    if callable(getattr(type(forward), "unwrap", None)):
        return _modules_of(forward.unwrap())
    return [], False


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a module by name, a tensor with two names twice."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}
