"""Nested containers of tensors: tuple, list, dict, named tuple and dataclass."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import torch

from graphrt.core.base.errors import OutputError

_FIXED = (torch.Tensor, bool, int, float, complex, str, bytes, type(None))
_DEEPEST = 200
"""The most levels of a tree; one that holds itself has more."""
_ATOMS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout})
"""Types that hold nothing, mostly."""


def _too_deep() -> OutputError:
    # CPython 3.13 loses its own RecursionError, and never ends for a list that holds itself twice.
    return OutputError(
        "a container of outputs or arguments holds itself",
        got=f"more than {_DEEPEST} levels of lists, tuples, dicts and dataclasses",
        expected="containers that end in tensors and plain values",
        advice="return, and pass, the tensors in a list of their own",
    )


def map_leaves(
    function: Callable[[Any], Any], tree: Any, of: type = torch.Tensor, depth: int = 0
) -> Any:
    """A tree of the same structure with `function` applied to everything that is no container, and
    is an `of`: to its tensors, or with `object` to every leaf. Raises `OutputError` for a tree that
    holds itself, as all walks do."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if depth > _DEEPEST:
        raise _too_deep()
    depth += 1
    if isinstance(tree, dict):
        # copy() keeps the type and what it carries besides its items (HF's ModelOutput does).
        mapped = copy.copy(tree)
        for key, value in tree.items():
            mapped[key] = map_leaves(function, value, of, depth)
        return mapped
    if isinstance(tree, tuple):
        values = [map_leaves(function, value, of, depth) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    if isinstance(tree, list):
        return [map_leaves(function, value, of, depth) for value in tree]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changed: Any = copy.copy(tree)
        for field in dataclasses.fields(tree):
            value = map_leaves(function, getattr(tree, field.name), of, depth)
            object.__setattr__(changed, field.name, value)
        return changed
    return function(tree) if isinstance(tree, of) else tree


def copied(tree: Any) -> Any:
    """A tree of the same structure with the same leaves."""
    return map_leaves(lambda leaf: leaf, tree, object)


def cloned(tree: Any) -> Any:
    """A tree of the same structure, each tensor in memory of its own."""
    return map_leaves(torch.Tensor.clone, tree)


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether torch has put off a conjugation or negation, which is no part of the memory."""
    return tensor.is_conj() or tensor.is_neg()


def copier(tree: Any) -> Callable[[], Any] | None:
    """A function that returns `copied(tree)`; None for a tree that nobody can change."""
    if not _can_change(tree):
        return None
    kind, inside = type(tree), tree.values() if type(tree) is dict else tree
    if kind in (list, dict) and not any(map(_can_change, inside)):
        flat: Callable[[], Any] = tree.copy  # most pieces return such a list
        return flat
    return partial(copied, tree)


def _can_change(tree: Any) -> bool:
    """Whether a tree has a container whose items its caller could replace."""
    if type(tree) is tuple:
        return any(map(_can_change, tree))
    return not isinstance(tree, _FIXED)


def _children(node: Any) -> list[tuple[str, Any]] | None:
    """The items of a container, each with its part of a path (`[0]`, `.name`); None for a leaf that
    is no tensor."""
    if isinstance(node, dict):
        return [(f"[{key!r}]", value) for key, value in node.items()]
    if isinstance(node, tuple | list):
        return [(f"[{at}]", value) for at, value in enumerate(node)]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(f".{each.name}", getattr(node, each.name)) for each in dataclasses.fields(node)]
    return None


def leaves(tree: Any, path: str = "", depth: int = 0) -> list[tuple[str, Any]]:
    """Every leaf with its path, such as `["hidden"][0]` or `.logits`, in a fixed order."""
    below = None if isinstance(tree, torch.Tensor) else _children(tree)
    if below is None:
        return [(path, tree)]
    if depth > _DEEPEST:
        raise _too_deep()
    pairs: list[tuple[str, Any]] = []
    for step, node in below:
        pairs += leaves(node, path + step, depth + 1)
    return pairs


def tensors(*trees: Any, depth: int = 0) -> list[torch.Tensor]:
    """Every tensor of the trees in the order of `leaves`."""
    if depth > _DEEPEST:
        raise _too_deep()
    below: list[torch.Tensor] = []
    for tree in trees:
        # Written for speed: a watch asks this of each operator's arguments and keywords, mostly a
        # tuple and a dict of tensors and numbers.
        if isinstance(tree, torch.Tensor):
            below.append(tree)
            continue
        if isinstance(tree, dict):
            nodes: Iterable[Any] = tree.values()
        elif isinstance(tree, tuple | list):
            nodes = tree
        else:
            nodes = [value for _, value in _children(tree) or ()]
        for node in nodes:
            if isinstance(node, torch.Tensor):
                below.append(node)
            elif type(node) not in _ATOMS:
                below += tensors(node, depth=depth + 1)
    return below


def octets(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a dense tensor as one row of bytes, in their order."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Not by reshape(), which keeps the stride of a tensor of one element: view() needs 1.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """What a graph bakes in about a tensor: address, shape, strides, dtype and device; for one that
    is not strided, and has no address, its `id`."""
    if tensor.layout is not torch.strided:
        return id(tensor), tuple(tensor.shape), tensor.layout, tensor.dtype, tensor.device
    shape = tuple(tensor.shape)
    return tensor.data_ptr(), shape, tensor.stride(), tensor.dtype, tensor.device


PLACEMENT: tuple[Callable[[torch.Tensor], object], ...] = (
    torch.Tensor.data_ptr,
    torch.Tensor.size,
    torch.Tensor.stride,
    operator.attrgetter("dtype"),
)
"""Functions in C that return address, shape, strides and dtype of a strided tensor, in the order of
`identity`: for looks at every step. On another device a tensor has another address."""


Placed: TypeAlias = tuple[torch.Tensor, int | None, int]
"""A tensor, its `storage_key`, and where its storage begins."""

BARE = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that are made of no others."""


def placed(values: Iterable[Any], *, parts: bool = False) -> list[Placed]:
    """The tensors among values and in lists of them, each with its `storage_key` and where the
    storage begins; with `parts` those that a subclass is made of in place of it."""
    tensors: list[Placed] = []
    pending = [*values]
    while pending:
        value = pending.pop(0)
        if not isinstance(value, torch.Tensor):
            if isinstance(value, list | tuple):
                pending[:0] = value
            continue
        flatten = None
        if parts and type(value) not in BARE:
            flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is not None:
            pending[:0] = [getattr(value, name) for name in flatten()[0]]
            continue
        key, address = None, 0
        if value.layout is torch.strided and not value.is_meta:
            # A tracer's tensors have a storage, and no memory: some raise where it is asked for.
            try:
                storage = value.untyped_storage()
                if storage.device.type != "meta":
                    key, address = storage._cdata, storage.data_ptr()
            except (NotImplementedError, RuntimeError):
                pass
        tensors.append((value, key, address))
    return tensors


def storage_keys(tree: Any) -> set[int | None]:
    """The `storage_key` of each tensor in a tree."""
    return {key for _, key, _ in placed(leaf for _, leaf in leaves(tree))}


def storage_key(tensor: torch.Tensor) -> int | None:
    """A number that names a tensor's memory while it lives; None where it has none of its own."""
    return placed([tensor])[0][1]
