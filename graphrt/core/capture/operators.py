"""What an operator says of itself: what it writes, and in which rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch

LIFT_FRESH = torch.ops.aten.lift_fresh.default
"""The operator that returns every tensor made from Python data, or from a NumPy array."""


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


class OperatorFacts(NamedTuple):
    """What is known of one overload of an operator."""

    name: str
    """Without the overload; "" for a higher-order operator, which has no schema."""
    writes: tuple[tuple[int, str], ...]
    """The arguments that it writes, by position and name."""
    rows: Callable[[Sequence[Any]], Rows] | None
    """Returns the rows that a call will write; None if it may write all."""
    is_aten: bool
    is_view: bool
    """Whether it reads and writes no memory, as it makes a view or changes a shape."""
    makes_no_memory: bool
    overwrites: bool
    """Whether it reads nothing of what it writes."""
    draws: bool = False
    """Whether it says that it draws random numbers."""
    may_draw: bool = False
    """Whether it may be given a generator."""


@cache
def facts_of(func: Any) -> OperatorFacts:
    """The facts of an overload. A higher-order operator, which has no schema, counts as one that
    writes nothing."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return OperatorFacts(
            name="",
            writes=(),
            rows=None,
            is_aten=False,
            is_view=False,
            makes_no_memory=False,
            overwrites=False,
            may_draw=True,
        )
    writes, is_aten = writes_of(schema), schema.name.startswith("aten::")
    # For each result, whether it is an argument or a view of one.
    are_aliases = [result.alias_info is not None for result in schema.returns]
    return OperatorFacts(
        schema.name,
        writes,
        rows=_ROWS.get(schema.name),
        is_aten=is_aten,
        is_view=schema.name in _RESHAPING or (not writes and any(are_aliases)),
        makes_no_memory=is_aten and schema.name not in _MAKING and all(are_aliases),
        # Whether a host's own operator reads what it writes is not known; most fill a buffer anew.
        overwrites=schema.name in _OVERWRITING
        or any(name == "out" for _, name in writes)
        or (bool(writes) and not is_aten),
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        may_draw=any("Generator" in str(argument.type) for argument in schema.arguments),
    )


def writes_of(schema: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operator writes, by position and name."""
    return tuple(
        (at, argument.name)
        for at, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        # The schemas of batch norms do not say that these are written.
        or ("batch_norm" in schema.name and argument.name in ("running_mean", "running_var"))
    )


def written(facts: OperatorFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The tensors that a call writes."""
    for at, name in facts.writes:
        value = args[at] if at < len(args) else kwargs.get(name)
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (each for each in value if isinstance(each, torch.Tensor))


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
_ROWS: dict[str, Callable[[Sequence[Any]], Rows]] = {
    **dict.fromkeys(("aten::index_put_", "aten::_index_put_impl_"), _by_index),
    **dict.fromkeys(
        ("aten::index_copy_", "aten::index_add_", "aten::index_fill_", "aten::index_reduce_"),
        _by_dim,
    ),
    **dict.fromkeys(("aten::scatter_", "aten::scatter_add_", "aten::scatter_reduce_"), _by_element),
}

# They bring in memory that no operator made: a storage, or Python data.
_MAKING = {"aten::set_", "aten::lift_fresh"}

# They change a tensor's shape or storage, and write no memory.
_RESHAPING = {"aten::resize_", "aten::resize_as_", "aten::set_"}

# They read nothing of what they write.
_OVERWRITING = {
    f"aten::{name}_"
    for name in ("copy", "fill", "zero", "normal", "uniform", "random", "exponential", "bernoulli")
}

# Their second and third argument are a dimension, and an index along it.
_BY_DIM = {
    *("index_select", "gather", "index_copy", "index_add", "index_fill", "index_reduce"),
    *("scatter", "scatter_add", "scatter_reduce"),
}


def in_bounds(func: Any, args: Sequence[Any]) -> bool:
    """Whether all indices that an operator of torch is given are inside of their tensor: in a run
    with made-up numbers they may not be. Waits for the device."""
    name = func._schema.name.partition("::")[2].strip("_")
    indexed: list[tuple[int, Any]] = []
    if name in ("embedding", "embedding_bag"):
        indexed = [(args[0].shape[0], args[1])]
    elif name in ("take", "put"):
        indexed = [(args[0].numel(), args[1])]
    elif name in ("index", "unsafe_index", "index_put", "index_put_impl"):
        indexed = _sizes_of(args[0], args[1])
    elif name in _BY_DIM and args[0].dim():
        indexed = [(args[0].shape[args[1]], args[2])]
    return all(
        index.numel() == 0 or (int(index.min()) >= -size and int(index.max()) < size)
        for size, index in indexed
    )


def _sizes_of(tensor: torch.Tensor, indices: Sequence[Any]) -> list[tuple[int, Any]]:
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
