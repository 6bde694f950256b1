"""What must stay as it is between a forward and its tensors, each cheap to look at."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.trust.places.slots import MISSING, Place

_BARE = (torch.Tensor, torch.nn.Parameter)
_DICTS = (dict, OrderedDict)


def where_is(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """What a graph bakes in about a tensor, see `tree.identity`; None if it has no memory of its
    own, or none that may be read. A subclass's `__torch_function__` is not run."""
    try:
        if type(tensor) in _BARE:
            return tree.identity(tensor)
        plainly: Callable[..., tuple[object, ...]] = torch.Tensor.__torch_function__
        return plainly(tree.identity, (), (tensor,))
    except RuntimeError:
        return None


class Link:
    """One thing between the forward and its tensors: does it still hold?"""

    __slots__ = ()

    @property
    def path(self) -> str:
        raise NotImplementedError

    def holds(self) -> bool:
        """Whether it is as it was at the walk."""
        raise NotImplementedError

    def change(self) -> str:
        """What is different now, for a message."""
        raise NotImplementedError


class SlotLink(Link):
    """The same object is at `place`."""

    __slots__ = ("held", "place")

    def __init__(self, place: Place, held: object) -> None:
        self.place, self.held = place, held

    @property
    def path(self) -> str:
        return self.place.path

    def holds(self) -> bool:
        return self.place.get() is self.held

    def change(self) -> str:
        now = self.place.get()
        if now is MISSING:
            return "it is gone"
        return f"another {type(now).__name__} is there"


class TensorLink(SlotLink):
    """The same tensor is at `place`, with the same address, shape, strides, dtype and device."""

    __slots__ = ("where",)
    held: torch.Tensor

    def __init__(self, place: Place, held: torch.Tensor) -> None:
        self.place, self.held, self.where = place, held, where_is(held)

    def holds(self) -> bool:
        held = self.held
        return self.place.get() is held and where_is(held) == self.where

    def change(self) -> str:
        if self.place.get() is not self.held:
            return super().change()
        return f"it is now at {where_is(self.held)}, was at {self.where}"


class LengthLink(Link):
    """A container has as many items as before."""

    __slots__ = ("_base", "_container", "_count", "_path")

    def __init__(self, path: str, container: Any, base: Any) -> None:
        self._path, self._container, self._base = path, container, base
        self._count = base.__len__(container)

    @property
    def path(self) -> str:
        return self._path

    @property
    def container(self) -> Any:
        """The container itself."""
        return self._container

    def holds(self) -> bool:
        return bool(self._base.__len__(self._container) == self._count)

    def change(self) -> str:
        return f"it has {self._base.__len__(self._container)} items, had {self._count}"


class AttributesLink(Link):
    """An object has the same class and the same attributes, whatever their values; of a module
    also the same parameters, buffers, submodules and forward hooks."""

    __slots__ = ("_class", "_count", "_dict", "_dict_of", "_inner", "_object", "_path")

    def __init__(
        self,
        path: str,
        owner: object,
        dict_of: Callable[[Any], dict[str, Any]],
        inner: Iterable[str] = (),
    ) -> None:
        self._path, self._object, self._dict_of, self._class = path, owner, dict_of, type(owner)
        self._dict = dict_of(owner)
        self._count = len(self._dict)
        named: list[tuple[str, Any]] = [(name, self._dict.get(name)) for name in inner]
        self._inner: tuple[tuple[str, Any, int], ...] = tuple(
            (name, held, len(held)) for name, held in named if type(held) in _DICTS
        )

    @property
    def path(self) -> str:
        return self._path

    def holds(self) -> bool:
        own, held = self._object, self._dict
        if type(own) is not self._class or self._dict_of(own) is not held:
            return False
        if len(held) != self._count:
            return False
        for name, inner, count in self._inner:
            if len(inner) != count or held.get(name) is not inner:
                return False
        return True

    def change(self) -> str:
        own, held = self._object, self._dict
        if type(own) is not self._class:
            return f"its class is {type(own).__name__}, was {self._class.__name__}"
        if self._dict_of(own) is not held:
            return "its __dict__ is another one"
        if len(held) != self._count:
            latest = ", ".join([*map(str, held)][self._count :])
            text = f"it has {len(held)} attributes, had {self._count}"
            return f"{text}; new: {latest}" if latest else text
        for name, inner, count in self._inner:
            if len(inner) != count:
                return f"{name} has {len(inner)} entries, had {count}"
            if held.get(name) is not inner:
                return f"{name} is another one"
        return "nothing"
