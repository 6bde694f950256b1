"""Steps that are one graph and nothing else: no context is made for them, as nobody reads one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from graphrt.core.base._native_door import NativeReplay
from graphrt.core.batch.descriptor import Batch, BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.graphs import hot_of
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.inputs.buffers import StaticInputs, reqs_of, wrong_requests
from graphrt.core.inputs.layout import InputLayout, StepMoves
from graphrt.core.inputs.slot import InputSlot
from graphrt.core.inputs.transport import InputRing
from graphrt.core.replay.handout import Handout, expire, handing_out, shell_of
from graphrt.core.replay.pool import GraphPool
from graphrt.core.runner.host import Bind

NOT_ALONE: Final = object()
"""Returned for a step that has to be run by its wrapper."""

Shape = tuple[int, ...]
Live = Callable[[Any, int, int, GraphPool], Any]
Replay = Callable[[Live, Batch, Mapping[str, Any]], Any]


class Read(NamedTuple):
    """What the graph of a step reads: where that lies, from which ring it fetches it, if it does,
    and as what `bind` gets it. `graded` says whether a step's inputs require a gradient."""

    inputs: StaticInputs
    layout: InputLayout
    ring: InputRing | None
    views: Mapping[str, torch.Tensor]
    bind: Bind | None
    graded: Callable[[Mapping[str, Any]], bool] | None


def replay_of(
    descriptor: BatchDescriptor,
    wrapper: GraphWrapper,
    pool: GraphPool,
    reqs: int,
    read: Read,
    alone: tuple[Handout, Mapping[tuple[int, int], Sequence[Shape]]] | None,
) -> Replay | None:
    """What runs a step without updates by the entry that `wrapper` has for a descriptor, of `reqs`
    requests at most, as a call of the wrapper would; None where that is not one graph.

    It is given what makes of the outputs what the caller gets, and does not keep it alive; of
    outputs that are one tensor `alone` hands that out, in shapes that are known. It returns
    `NOT_ALONE` once the wrapper has another entry, and for inputs whose gradients the outputs have
    to say that they end. Its caller has the pool's turn. Raises
    `InvalidInputError` and `InvalidBatchError`.
    """
    hot, entry = hot_of(wrapper), wrapper.entries[descriptor]
    graph, outputs = entry.graph, entry.outputs
    # With several pieces it is the wrapper that counts them as one step.
    if graph is None or hot.clones or hot.mode is not GraphMode.FULL:
        return None
    inputs, layout, ring, views, bind, graded = read
    fill_from = inputs.fill_from
    fill, in_graph, follow_stream = inputs.fill, ring is not None, pool.follow_stream
    read_stream_id = pool.read_stream_id
    known, fetch, all_packed = layout.known, layout.fetch, inputs.all_packed
    hand_out, shapes = (None, {}) if alone is None else alone
    handed_out, count = pool.handed_out, len(layout.fields)
    # Where the wrapper itself would look for it.
    slot = hot.by_slot.index(entry)
    # What is known of the last batch's rows.
    seen: tuple[Any, ...] = None, 0, 0, None, None

    def replay(live: Live, batch: Batch, values: Mapping[str, Any]) -> Any:
        nonlocal seen
        last, tokens, live_reqs, moves, live_shapes = seen
        if batch is not last:
            tokens, live_reqs = batch[0], batch[1]
            if live_reqs is None:
                live_reqs = reqs_of(inputs, batch, values)
            if not 1 <= live_reqs <= reqs:
                raise wrong_requests(live_reqs, reqs)
            moves = known.get((tokens, live_reqs)) if all_packed else None
            live_shapes = shapes.get((tokens, live_reqs))
            if moves is not None and live_shapes is not None and batch[1] is not None:
                seen = batch, tokens, live_reqs, moves, live_shapes
        by_slot = hot.by_slot
        if slot >= len(by_slot) or by_slot[slot] is not entry or entry.unchecked:
            return NOT_ALONE
        if pool.closed:
            pool.check_open()
        if pool.step is not None:
            pool._leave_step(None)
        if read_stream_id is None or read_stream_id() == pool.stream_id:
            stream = pool.last_stream
        else:
            stream = follow_stream()
        alike = None if moves is None else moves.alike
        if type(values) is InputSlot and values.moves is moves is not None:
            fill_from(values, layout, moves, stream, in_graph)
        elif alike is None or type(values) is InputSlot or len(values) != count:
            if graded is not None and graded(values):
                return NOT_ALONE
            fill(values, layout, tokens, live_reqs, stream, in_graph)
        else:
            # First: slots that were handed out are given up, whatever comes of the step.
            inputs.turn += 1
            if not alike(values, fetch, in_graph):
                # Of those that are alike none requires one.
                if graded is not None and graded(values):
                    return NOT_ALONE
                fill(values, layout, tokens, live_reqs, stream, in_graph)
        if handed_out:
            # Not before: they may have been among the inputs.
            expire(handed_out)
        if bind is not None:
            bind(views, descriptor, "replay")
        pool.generation += 1
        graph.replay()
        if ring is not None:
            ring.launched()
        if hand_out is None or live_shapes is None:
            handed = live(outputs, tokens, live_reqs, pool)
        else:
            handed = hand_out(live_shapes[0], handed_out)
        return handed

    def look(batch: Batch) -> tuple[StepMoves, Shape] | None:
        tokens, live_reqs = batch[0], batch[1]
        if not all_packed or live_reqs is None or not 1 <= live_reqs <= reqs:
            return None
        moves, live = known.get((tokens, live_reqs)), shapes.get((tokens, live_reqs))
        return None if moves is None or live is None else (moves, live[0])

    shell = None if hand_out is None else shell_of(hand_out)
    if NativeReplay is None or shell is None or ring is None or bind is not None:
        return replay
    if type(pool) is not GraphPool:
        # One of the host's may have properties in place of what is read where it lies.
        return replay
    found: Replay = NativeReplay(
        slow=replay,
        look=look,
        hot=hot,
        entry=entry,
        place=slot,
        pool=pool,
        inputs=inputs,
        ring=ring,
        fetch=fetch,
        graph=graph,
        stream=read_stream_id,
        count=count,
        moves=StepMoves,
        outputs=handing_out(shell, handed_out),
    )
    return found
