"""The arguments that a graph was captured with, and whether a step has the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphrt.core.base import StaleInputError, tree
from graphrt.core.device import GraphRead, Platform
from graphrt.core.replay.eager_part import name_of
from graphrt.core.replay.entry import Entry
from graphrt.core.replay.pool import GraphPool


def arguments_of(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[str, tuple[object, ...]], ...]:
    """Every argument that a graph bakes in, with its path in the call: tensors by where and what
    they are, plain values as they are. Asked before the call, which may clear a list of them."""
    found = []
    for path, leaf in tree.leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor):
            found.append((path, tree.identity(leaf)))
        elif isinstance(leaf, int | float | str | None):
            found.append((path, (leaf,)))
    return tuple(found)


def pooled_paths(args: tuple[Any, ...], kwargs: dict[str, Any], pool: GraphPool) -> frozenset[str]:
    """The paths of arguments that lie in the pool, where the platform can tell what graphs read
    outside of it; else none, as none are needed to say that an argument is read."""
    platform = pool.platform
    if type(platform).reads is Platform.reads:
        return frozenset()
    return frozenset(
        path
        for path, leaf in tree.leaves((args, kwargs))
        if isinstance(leaf, torch.Tensor) and platform.owns(pool.memory, leaf)
    )


def check_arguments(
    entry: Entry,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    pool: GraphPool,
    runnable: Callable[..., Any],
) -> None:
    """Raise `StaleInputError` unless a graph's arguments are what it was captured with; tensors
    that it does not read, as far as the platform can tell, may be others."""
    now = arguments_of(args, kwargs)
    if now == entry.inputs:
        return
    before = dict(entry.inputs)
    reads, _ = entry.reads(pool)
    for path, bound in now:
        if before.get(path) == bound:
            continue
        if path in entry.pooled or not _is_unread(before.get(path), reads):
            raise StaleInputError(
                f"argument {path} of {name_of(runnable)} is not where the graph of "
                f"[{entry.descriptor}] reads it",
                got=bound,
                expected=before.get(path, "no such tensor at capture"),
                advice="copy_() into the tensor that it was captured with, and pass that one at "
                "every step; or let GraphRunner own the buffers",
            )
    if [path for path, _ in now] == [path for path, _ in entry.inputs]:
        return
    raise StaleInputError(
        f"the graph of {name_of(runnable)} for [{entry.descriptor}] was captured with other "
        "arguments",
        got=[path for path, _ in now],
        expected=[path for path, _ in entry.inputs],
        advice="call the wrapper with the same arguments at every step",
    )


def _is_unread(captured: tuple[object, ...] | None, reads: Sequence[GraphRead] | None) -> bool:
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
