"""The weights that a forward says it has: those of its modules, and those that the host names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from graphrt.core.base import InvalidOptionError, shown, tree

Tensors: TypeAlias = Mapping[str, torch.Tensor] | Iterable[torch.Tensor]
"""Tensors by name, or one after the other."""

Parameters: TypeAlias = torch.nn.Module | Tensors | Callable[[], Tensors] | None
"""A module; a mapping or sequence that the forward itself reads; or what returns the tensors that
are in use when it is called."""

Named: TypeAlias = Callable[[], Mapping[str, torch.Tensor]]


class Weights:
    """The named weights of one forward.

    `parameters` are what the host named. Without them, the module that `forward` is, or is a method
    of, is asked. `compiled` return the weights of compiled modules. `complete` says that the
    forward is made of modules alone.
    """

    def __init__(self, forward: Any, parameters: Parameters, compiled: Sequence[Named]) -> None:
        modules, self.complete = _modules_of(forward)
        self.by_host = parameters is not None
        self._sources: list[Named] = [functools.partial(_tensors, module) for module in modules]
        self._sources += compiled
        if parameters is not None:
            self._sources.append(functools.partial(_tensors, parameters))

    def now(self) -> dict[tuple[int, str], torch.Tensor]:
        """The tensors in use, each by its source and name."""
        return {
            (index, name): tensor
            for index, source in enumerate(self._sources)
            for name, tensor in source().items()
        }


def check_parameters(parameters: object) -> None:
    """Raise `InvalidOptionError` for what cannot be asked where weights are."""
    if parameters is None or isinstance(parameters, torch.nn.Module):
        return
    if isinstance(parameters, Iterator):
        raise InvalidOptionError(
            "Host(parameters=) is an iterator: it gives the tensors of now, so one that takes the "
            "place of another would not be seen",
            got=shown(parameters),
            expected="a module, or a function that returns the tensors in use",
            advice="parameters=model, or parameters=model.parameters without ()",
        )
    values: object = parameters
    if isinstance(parameters, Mapping):
        values = list(parameters.values())
    elif callable(parameters):
        return
    if (
        isinstance(values, torch.Tensor | str)
        or not isinstance(values, Iterable)
        or not all(isinstance(each, torch.Tensor) for each in values)
    ):
        raise InvalidOptionError(
            "Host(parameters=) holds no tensors",
            got=shown(parameters),
            expected="a module, tensors by name, a sequence of tensors, or what returns them",
            advice="parameters=model",
        )


def _modules_of(forward: Any) -> tuple[list[torch.nn.Module], bool]:
    """The modules that a forward is made of, and whether it is made of nothing else."""
    if isinstance(forward, torch.nn.Module):
        return [forward], True
    if isinstance(forward, functools.partial):
        found, complete = _modules_of(forward.func)
        given = tree.leaves((forward.args, forward.keywords))
        more = [value for _, value in given if isinstance(value, torch.nn.Module)]
        # A tensor in it is not looked up again: what it stands for may have been replaced.
        return found + more, complete and not tree.tensors((forward.args, forward.keywords))
    if inspect.ismethod(forward) and isinstance(forward.__self__, torch.nn.Module):
        return [forward.__self__], True
    # Wrappers and compiled modules.
    if callable(getattr(type(forward), "unwrap", None)):
        return _modules_of(forward.unwrap())
    return [], False


def _tensors(source: Any) -> dict[str, torch.Tensor]:
    if isinstance(source, torch.nn.Module):
        parameters = source.named_parameters(remove_duplicate=False)
        return {**dict(parameters), **dict(source.named_buffers(remove_duplicate=False))}
    if callable(source):
        source = source()
        source = list(source) if isinstance(source, Iterator) else source
        check_parameters(source)
    if isinstance(source, Mapping):
        return dict(source)
    return {str(index): tensor for index, tensor in enumerate(source)}
