"""What the graphs of a runner read, by what the device and the watched warm-ups say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from graphrt.core.capture import GraphOwner, GraphWrapper
from graphrt.core.device import GraphRead
from graphrt.core.replay import GraphPool
from graphrt.core.trust import AddressBook, Reads


def check_reads(
    weights: AddressBook,
    reads: Reads | None,
    owners: Iterable[GraphOwner],
    pool: GraphPool,
    own: Sequence[torch.Tensor],
) -> None:
    """Raise `StaleInputError` if a tensor that graphs read is another one by now, and
    `UntrackedWeightsError` if graphs read what nobody knows the owner of; `own` are the tensors of
    the runner itself."""
    known = [*own]
    if reads is not None:
        moved = reads.moved()
        if moved:
            raise reads.stale(moved)
        known += reads.reachable()
    found: list[GraphRead] | None = []
    for owner in owners:
        for entry in owner.entries.values() if isinstance(owner, GraphWrapper) else ():
            read, results = entry.reads(pool)
            found = None if found is None or read is None else found + read
            known += results
    if found is None and reads is not None and not reads.saw_compiled_code:
        found = reads.as_graph_reads()
    weights.check_known(found, known)
