"""The arguments of a denoiser's call: its tensors by name, and the rest as a signature.

1. `read_call` flattens nested dicts, lists and tuples. Tensors get a name (`added_cond_kwargs/
   text_embeds`), and everything else goes into the signature, with the shapes and dtypes.
2. Calls of one signature differ in nothing but the values of their tensors, so one graph serves
   them all.
3. A `Template` is such a call without its tensors, and puts other ones in their places.

An object whose value cannot be compared is refused by name: it could change unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

_PLAIN: tuple[type, ...] = (bool, int, str, bytes, type(None), torch.Size, torch.dtype)
_PLAIN += (torch.device, torch.layout, torch.memory_format)
_TENSORS = (torch.Tensor, torch.nn.Parameter)


Signature = tuple[Hashable, ...]


class UnservedArgument(Exception):
    """An argument that a signature cannot hold; the message names it."""


class Call(NamedTuple):
    """The tensors of one call by name, and its signature."""

    tensors: dict[str, torch.Tensor]
    signature: Signature


def read_call(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Flatten the arguments of a call, whose positional ones have these `names`; raises
    `UnservedArgument`."""
    tensors: dict[str, torch.Tensor] = {}
    signature: list[Hashable] = [len(args)]
    for path, value in _by_name(names, args, kwargs):
        _read(path, value, tensors, signature)
    if not tensors:
        raise UnservedArgument("no argument is a tensor")
    return Call(tensors, tuple(signature))


def _by_name(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    for index, value in enumerate(args):
        yield names[index] if index < len(names) else str(index), value
    yield from kwargs.items()


def _read(
    path: str, value: Any, tensors: dict[str, torch.Tensor], signature: list[Hashable]
) -> None:
    kind = type(value)
    if kind in _TENSORS:
        if value.layout is not torch.strided or value.is_meta or value.is_nested:
            raise UnservedArgument(f"{path} is no dense tensor")
        tensors[path] = value
        signature.append(_OfTensor(path, value.shape, value.dtype, value.device))
    elif kind is dict:
        signature.append((path, dict, *((type(key), key) for key in value)))
        for key, item in value.items():
            _read(f"{path}/{key}", item, tensors, signature)
    elif kind in (list, tuple):
        signature.append((path, kind, len(value)))
        for index, item in enumerate(value):
            _read(f"{path}/{index}", item, tensors, signature)
    elif kind is float:
        # As text: nan equals nothing, and -0.0 equals 0.0.
        signature.append((path, float, value.hex()))
    elif kind in _PLAIN:
        # 1 and True are equal, and not the same to a forward.
        signature.append((path, kind, value))
    else:
        raise UnservedArgument(f"{path} is a {kind.__module__}.{kind.__qualname__}")


def shapes_of(signature: Signature) -> str:
    """The shapes of the tensors in a signature, as text."""
    tensors = [each for each in signature if isinstance(each, _OfTensor)]
    return ", ".join(f"{each.name} {tuple(each.shape)}" for each in tensors)


class _OfTensor(NamedTuple):
    """A tensor in a signature: calls differ by its shape, and not by its values."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Template:
    """A call without its tensors, to be made again with others."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """`args` and `kwargs` are those of a call that `read_call` takes."""
        places = iter(range(1 << 62))
        self._call = _mapped(_TENSORS, lambda _: _Place(next(places)), (list(args), dict(kwargs)))

    def filled(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with `tensors`, in the order in which `read_call` lists them.

        Containers are new ones: UNet's forward empties the list of a T2I adapter's residuals.
        """
        args, kwargs = _mapped((_Place,), lambda place: tensors[place.at], self._call)
        return args, kwargs


class _Place(NamedTuple):
    """Stands for a tensor in a `Template`: number `at` of the call's tensors."""

    at: int


def _mapped(kinds: tuple[type, ...], function: Callable[[Any], Any], value: Any) -> Any:
    kind = type(value)
    if kind in kinds:
        return function(value)
    if kind is dict:
        return {key: _mapped(kinds, function, item) for key, item in value.items()}
    if kind in (list, tuple):
        return kind(_mapped(kinds, function, item) for item in value)
    return value
