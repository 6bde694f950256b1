"""The arguments that a graph was captured with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from graphrt.core.base import tree
from graphrt.core.device.graph import GraphRead
from graphrt.core.device.platform import Platform
from graphrt.core.replay.pool import GraphPool


class BoundArguments(NamedTuple):
    """Every argument that a graph bakes in, with its path in the call: tensors by where and what
    they are, plain values as they are."""

    values: tuple[tuple[str, tuple[object, ...]], ...]
    pooled: frozenset[str]
    """The paths of tensors in the pool, where the platform can tell what graphs read outside of it;
    else none, as none are needed to say that an argument is read."""

    @classmethod
    def of(
        cls, args: tuple[Any, ...], kwargs: dict[str, Any], pool: GraphPool | None
    ) -> BoundArguments:
        """Those of a call; asked before it, as it may clear a list of them. Without a `pool` nobody
        asks which lie in one."""
        found: list[tuple[str, tuple[object, ...]]] = []
        pooled: list[str] = []
        tells = pool is not None and type(pool.platform).reads is not Platform.reads
        for path, leaf in tree.leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                found.append((path, tree.identity(leaf)))
                if tells and pool is not None and pool.platform.owns(pool.memory, leaf):
                    pooled.append(path)
            elif isinstance(leaf, int | float | str | None):
                found.append((path, (leaf,)))
        return cls(tuple(found), frozenset(pooled))


def is_unread(captured: tuple[object, ...] | None, reads: Sequence[GraphRead] | None) -> bool:
    """Whether a tensor argument, as it was captured, is known to be read by no graph."""
    if captured is None or len(captured) == 1 or reads is None:
        return False
    if isinstance(captured[2], torch.layout):
        return False  # sparse: it has no address to look for
    address = captured[0]
    assert isinstance(address, int)
    for read in reads:
        storage = read.tensor.untyped_storage()
        if storage.data_ptr() <= address < storage.data_ptr() + max(storage.nbytes(), 1):
            return False
    return True
