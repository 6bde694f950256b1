"""`capture()`: warm-up and capture of every planned graph, undone where it must be."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch

from graphrt.core.context import ForwardContext
from graphrt.core.descriptor import BatchDescriptor
from graphrt.core.errors import GraphRTError, ResourceExhaustedError
from graphrt.core.frozen_gc import frozen_gc
from graphrt.core.modes import GraphMode
from graphrt.core.plan import StepPlan
from graphrt.core.pool import GraphPool
from graphrt.core.state import SavedState
from graphrt.core.tasks import WORST_CASE
from graphrt.core.transaction import CaptureTransaction

Phase = Literal["warmup", "capture", "replay", "eager"]
Progress = Callable[[int, int, BatchDescriptor], None]


@dataclass(frozen=True)
class GraphRecord:
    """What capturing one graph took."""

    mode: GraphMode
    descriptor: BatchDescriptor
    capture_s: float
    pool_bytes: int | None
    """Bytes by which the pool grew; None where the platform cannot tell."""
    driver_bytes: int | None = None
    """Bytes that the device's driver took for the executable graphs, with what else it took
    meanwhile, for other processes too; None where the platform cannot tell."""


@dataclass(frozen=True)
class DroppedGraph:
    """A graph that did not fit on the device; its sizes run eagerly."""

    mode: GraphMode
    descriptor: BatchDescriptor
    reason: str


@dataclass(frozen=True)
class PlannedGraph:
    """A graph to capture: its key, its slot, and the step it will serve."""

    mode: GraphMode
    descriptor: BatchDescriptor
    slot: int
    plan: StepPlan


def capture_graphs(
    planned: Iterable[PlannedGraph],
    *,
    pool: GraphPool,
    warmups: int,
    share_warmups: bool,
    bind: Callable[[StepPlan, Phase], None],
    state: SavedState,
    capture_context: Callable[[], AbstractContextManager[object]],
    publish: Callable[[PlannedGraph, GraphRecord, CaptureTransaction], None],
    drop: Callable[[PlannedGraph, ResourceExhaustedError], None],
    progress: Progress | None = None,
) -> None:
    """Capture `planned` in its order and publish each graph once all its wrappers have it.

    A graph that fails is rolled back and the error raised; those before it stay published. One
    that the device has no room for is rolled back and dropped: smaller ones after it may fit.
    With `share_warmups` graphs of one size and kind, FULL and PIECEWISE, are warmed up once.
    `state` is restored after every forward, so that each starts from it. The pool is held all the
    time: a step of another thread would read buffers that a capture fills.
    """
    graphs = list(planned)
    if not graphs:
        return
    session, platform = _Session(), pool.platform
    warm: set[Hashable] = set()
    with frozen_gc(), pool.owned_by(session), capture_context():
        for done, graph in enumerate(graphs):
            if progress is not None:
                progress(done, len(graphs), graph.descriptor)
            transaction = CaptureTransaction(graph.slot)
            started, before = time.perf_counter(), pool.bytes()
            try:
                kind = _kind(graph)
                for _ in range(0 if kind in warm else warmups):
                    bind(graph.plan, "warmup")
                    _run(graph, _context(graph, GraphMode.NONE, None), pool, session, state)
                if share_warmups:
                    warm.add(kind)
                outside = platform.driver_bytes()
                bind(graph.plan, "capture")
                _run(graph, _context(graph, graph.mode, transaction), pool, session, state)
                record = GraphRecord(
                    graph.mode,
                    graph.descriptor,
                    time.perf_counter() - started,
                    _growth(before, pool.bytes()),
                    _growth(outside, platform.driver_bytes()),
                )
                publish(graph, record, transaction)
            except BaseException as error:
                transaction.rollback()
                exhausted = _exhausted(error, pool)
                if exhausted is not None:
                    drop(graph, exhausted)
                    # Its traceback holds what the forward had allocated, and this frame.
                    del exhausted
                    continue
                if hasattr(error, "add_note"):
                    error.add_note(f"while capturing {graph.mode.name} [{graph.descriptor}]")
                raise
        if progress is not None:
            progress(len(graphs), len(graphs), graphs[-1].descriptor)


def _kind(graph: PlannedGraph) -> Hashable:
    """What is equal for graphs whose warm-ups read the same inputs."""
    own, plan = graph.descriptor, graph.plan
    return plan.tokens, plan.reqs, own.has_lora, own.num_active_loras, own.bounds, own.variant


def _growth(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _exhausted(error: BaseException, pool: GraphPool) -> ResourceExhaustedError | None:
    """What `error` says if it says that the device has no room; warm-ups raise it unexplained."""
    if isinstance(error, Exception) and not isinstance(error, GraphRTError):
        error = pool.platform.explain(error)
    return error if isinstance(error, ResourceExhaustedError) else None


class _Session:
    """Owns a pool between the forwards of a `capture()`."""

    def __repr__(self) -> str:
        return "capture()"


def _context(
    graph: PlannedGraph, mode: GraphMode, transaction: CaptureTransaction | None
) -> ForwardContext:
    return ForwardContext(
        mode,
        graph.descriptor,
        updates=WORST_CASE,
        capture=transaction,
        num_reqs=graph.plan.reqs,
    )


def _run(
    graph: PlannedGraph,
    context: ForwardContext,
    pool: GraphPool,
    session: _Session,
    state: SavedState,
) -> None:
    pool.hand_over(context)
    try:
        with torch.no_grad(), context:
            graph.plan.call(**graph.plan.arguments())
    finally:
        pool.hand_over(session)
        state.restore()
