"""Where the weights of a forward were when its graphs were captured, and whose they are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from graphrt.core.base import (
    InvalidOptionError,
    StaleInputError,
    UntrackedWeightsError,
    shown,
    tree,
)
from graphrt.core.device import GraphRead

Tensors: TypeAlias = Mapping[str, torch.Tensor] | Iterable[torch.Tensor]
"""Tensors by name, or one after the other."""

Parameters: TypeAlias = torch.nn.Module | Tensors | Callable[[], Tensors] | None
"""A module; a mapping or sequence that the forward itself reads; or what returns the tensors that
are in use when it is called."""

Where: TypeAlias = tuple[object, ...]
Named: TypeAlias = Callable[[], Mapping[str, torch.Tensor]]


class AddressBook:
    """Where tensors are now, compared with where they were at `record()`.

    `parameters` are what the host named. Without them, the module that `forward` is, or is a method
    of, is asked. `compiled` are the weights of compiled modules.
    """

    def __init__(
        self, parameters: Parameters, forward: Any = None, compiled: Sequence[Named] = ()
    ) -> None:
        self._named_by_host = parameters is not None
        self._modules, self._knows_forward = _modules_of(forward)
        self._sources: list[Named] = [functools.partial(_tensors, m) for m in self._modules]
        self._sources += compiled
        if parameters is not None:
            self._sources.append(functools.partial(_tensors, parameters))
        self._captured: list[dict[str, Where]] = []

    def record(self) -> None:
        """Remember where everything is now."""
        self._captured = [_places(source()) for source in self._sources]

    def check(self) -> None:
        """Raise `StaleInputError` if something that graphs read has moved."""
        moved: dict[str, None] = {}
        for source, before in zip(self._sources, self._captured, strict=False):
            now = _places(source())
            moved.update({name: None for name, where in before.items() if now.get(name) != where})
        if moved:
            raise StaleInputError(
                "weights are not where the graphs read them",
                got=", ".join([*moved][:8]) + (f" and {len(moved) - 8} more" * (len(moved) > 8)),
                expected="every one where it was at capture",
                advice="write new values into the old tensors, as by copy_(), or call recapture()",
            )

    def check_known(self, reads: Sequence[GraphRead] | None, own: Iterable[torch.Tensor]) -> None:
        """Raise `UntrackedWeightsError` if graphs read what nobody compares.

        `reads` are the tensors that graphs read, None if the device cannot tell; `own` are those
        that are no weights.
        """
        if self._named_by_host or (reads is None and self._knows_forward):
            return
        advice = (
            "Host(parameters=the module), or parameters=a function that returns the tensors in use "
            "by name; Host(parameters={}) says that there are no weights"
        )
        if reads is None:
            raise UntrackedWeightsError(
                "whether weights moved cannot be told: the forward is no module, and this device "
                "does not say what its graphs read",
                expected="to know the weights of the forward",
                advice=advice,
            )
        known = {_storage(tensor) for tensor in own}
        for source in self._sources:
            known |= {_storage(tensor) for tensor in source().values()}
        unknown = {
            _storage(read.tensor): read for read in reads if _storage(read.tensor) not in known
        }
        if unknown:
            lines = [f"{_text(read)}" for read in unknown.values()]
            raise UntrackedWeightsError(
                f"whether weights moved cannot be told of {len(lines)} tensors that graphs read",
                got="\n    ".join(["", *lines[:8]]),
                expected="tensors of the module that the forward is, or that the host has named",
                advice=advice,
            )


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


def _places(tensors: Mapping[str, torch.Tensor]) -> dict[str, Where]:
    return {name: tree.identity(tensor) for name, tensor in tensors.items()}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _text(read: GraphRead) -> str:
    tensor = read.tensor
    return f"{tensor.dtype} {tuple(tensor.shape)}, read at {read.source or 'an unknown line'}"
