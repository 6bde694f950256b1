"""What the graphs of a runner may touch and no watched run has used."""

from __future__ import annotations

from collections.abc import Collection

from graphrt.core.batch import BatchDescriptor
from graphrt.core.capture import GraphWrapper, as_states
from graphrt.core.device import DeviceGraph
from graphrt.core.inputs import StaticInputs
from graphrt.core.replay import GraphPool, graphs_of
from graphrt.core.runner.graphs import GraphSet
from graphrt.core.trust import UnknownMemory, Use, address_of, places_of, unknown_memory


def unknown_memory_of(
    graphs: GraphSet,
    pool: GraphPool,
    inputs: StaticInputs,
    only: Collection[BatchDescriptor] | None = None,
) -> UnknownMemory | None:
    """The memory outside of graph pools that nodes of the graphs point to and that is neither an
    input, a result, declared state, nor what a watched warm-up used: what is read by kernels
    outside of torch's operators, and by compiled code.

    With `only`, the graphs of these descriptors, as the tried ones: each takes milliseconds.
    Blocks are named by where the forward has them. None if there are no graphs, nothing was
    watched, or the platform cannot tell.
    """
    if graphs.reads is None or not graphs.records:
        return None
    own = [*inputs.buffers.values()]
    own += [state.tensor for state in as_states(graphs.state) if state.tensor is not None]
    found: list[DeviceGraph] = []
    for owner in graphs.owners():
        for entry in owner.entries.values() if isinstance(owner, GraphWrapper) else ():
            if only is None or entry.descriptor in only:
                found += graphs_of(entry.parts)
            own += entry.reads(pool)[1]
    known = graphs.reads.addresses() | set(map(address_of, own))
    unknown = unknown_memory(pool.platform, found, known)
    return unknown if unknown is None or not unknown.blocks else _named(unknown, graphs.forward)


def keep_touched(
    graphs: GraphSet, pool: GraphPool, inputs: StaticInputs, only: Collection[BatchDescriptor]
) -> None:
    """Count as read what nodes of these graphs point to and the forward holds."""
    unknown = unknown_memory_of(graphs, pool, inputs, only)
    if graphs.reads is None or unknown is None or not unknown.blocks:
        return
    touched = {block.address for block in unknown.blocks}
    for tensor in graphs.reads.reachable():
        if address_of(tensor) in touched:
            graphs.reads.add(tensor, Use(tensor, "a kernel that is no operator of torch's"))
    graphs.reads.settle()


def _named(unknown: UnknownMemory, forward: object) -> UnknownMemory:
    paths: dict[int, str] = {}
    for place, tensor in places_of(forward).tensors:
        address = address_of(tensor)
        if address not in paths or len(place.path) < len(paths[address]):
            paths[address] = place.path
    blocks = tuple(block._replace(name=paths.get(block.address, "")) for block in unknown.blocks)
    return unknown._replace(blocks=blocks)
