"""The rows that an operator will write, and whether it reads what it writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch

from graphrt.core.capture.operators import facts_of

Index: TypeAlias = tuple[slice | torch.Tensor, ...]
"""What stands in `tensor[...]`; () is all of the tensor."""


class Rows(NamedTuple):
    """The rows of a tensor that an operator will write: the index `at`, and the tensors in it that
    have row numbers from the caller, `chosen`."""

    at: Index
    chosen: tuple[torch.Tensor, ...] = ()

    @property
    def dim(self) -> int:
        """At which dimension of `tensor[at]` those of the index tensors begin."""
        places = [at for at, each in enumerate(self.at) if isinstance(each, torch.Tensor)]
        # They come first if there are other dimensions between the index tensors.
        return places[0] if places[-1] - places[0] < len(places) else 0


WHOLE = Rows(())
"""All of a tensor."""


def indices_of(args: Sequence[Any]) -> int:
    """How many indices a call that writes rows is given, along its longest."""
    indices = args[1] if isinstance(args[1], list | tuple) else args[2:3]
    return max((i.numel() for i in indices if isinstance(i, torch.Tensor)), default=0)


# Of a call's arguments, the rows that it will write: by a tuple of indices, by one index along a
# dimension, and by an index for each element.


def _by_index(args: Sequence[Any]) -> Rows:
    at = tuple(slice(None) if i is None else _copied(i) for i in args[1])
    chosen = tuple(i for i in at if isinstance(i, torch.Tensor))
    # A mask has no row numbers.
    return Rows(at, () if any(i.dtype is torch.bool for i in chosen) else chosen)


def _copied(index: torch.Tensor) -> torch.Tensor:
    # The index may itself be written before the rows are put back.
    copy = index.clone()
    # An index without dimensions would be taken for a number, and `tensor[at]` would be a view.
    return copy if copy.dim() or copy.dtype is torch.bool else copy.reshape(1)


def _by_dim(args: Sequence[Any]) -> Rows:
    tensor, dim, index = args[0], args[1], _copied(args[2])
    if tensor.dim() == 0:
        return WHOLE
    return Rows((*[slice(None)] * (dim % tensor.dim()), index), (index,))


def _by_element(args: Sequence[Any]) -> Rows:
    tensor, dim, index = args[0], args[1], args[2].clone()
    if tensor.dim() == 0:
        return WHOLE
    counts = [torch.arange(size, device=index.device) for size in index.shape]
    at = [*torch.meshgrid(counts, indexing="ij")]
    at[dim] = index
    return Rows(tuple(at), (index,))


# name of an operator -> what returns the rows that a call of it will write.
ROWS: dict[str, Callable[[Sequence[Any]], Rows]] = {
    **dict.fromkeys(("aten::index_put_", "aten::_index_put_impl_"), _by_index),
    **dict.fromkeys(
        ("aten::index_copy_", "aten::index_add_", "aten::index_fill_", "aten::index_reduce_"),
        _by_dim,
    ),
    **dict.fromkeys(("aten::scatter_", "aten::scatter_add_", "aten::scatter_reduce_"), _by_element),
}

# Their second and third argument are a dimension, and an index along it.
_BY_DIM = {
    *("index_select", "gather", "index_copy", "index_add", "index_fill", "index_reduce"),
    *("scatter", "scatter_add", "scatter_reduce"),
}


def in_bounds(func: Any, args: Sequence[Any]) -> bool:
    """Whether all indices that an operator of torch is given are inside of their tensor: in a run
    with made-up numbers they may not be. Waits for the device."""
    return all(
        index.numel() == 0 or (int(index.min()) >= -size and int(index.max()) < size)
        for size, index in indexed_by(func, args)
    )


def indexed_by(func: Any, args: Sequence[Any]) -> list[tuple[int, torch.Tensor]]:
    """(size of the dimension, the row numbers along it) for each index that an operator of torch
    is given."""
    name = func._schema.name.partition("::")[2].strip("_")
    if name in ("embedding", "embedding_bag"):
        return [(args[0].shape[0], args[1])]
    if name in ("take", "put"):
        return [(args[0].numel(), args[1])]
    if name in ("index", "unsafe_index", "index_put", "index_put_impl"):
        return _sizes_of(args[0], args[1])
    if name in _BY_DIM and args[0].dim():
        return [(args[0].shape[args[1]], args[2])]
    return []


def _sizes_of(tensor: torch.Tensor, indices: Sequence[Any]) -> list[tuple[int, torch.Tensor]]:
    """(size of the dimension, the index along it) for each of `indices` that has row numbers; masks
    have none, and cover as many dimensions as they have."""
    sizes, dim = [], 0
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            if index is not None:
                sizes.append((tensor.shape[dim], index))
            dim += 1
        else:
            dim += index.dim()
    return sizes


# They read nothing of what they write.
_OVERWRITING = {
    f"aten::{name}_"
    for name in ("copy", "fill", "zero", "normal", "uniform", "random", "exponential", "bernoulli")
}


@cache
def overwrites(func: Any) -> bool:
    """Whether an operator reads nothing of what it writes."""
    facts = facts_of(func)
    # Whether a host's own operator reads what it writes is not known; most fill a buffer anew.
    return (
        facts.name in _OVERWRITING
        or any(name == "out" for _, name in facts.writes)
        or (bool(facts.writes) and not facts.is_aten)
    )


@cache
def draws(func: Any) -> bool:
    """Whether an operator draws random numbers, or may: one of a host's, or a higher-order one, of
    which torch does not say so."""
    tags = getattr(func, "tags", None)
    return tags is None or torch.Tag.nondeterministic_seeded in tags or not facts_of(func).is_aten


@cache
def may_draw(func: Any) -> bool:
    """Whether an operator may be given a generator. A higher-order one has no schema that says."""
    schema = getattr(func, "_schema", None)
    return schema is None or any("Generator" in str(each.type) for each in schema.arguments)
