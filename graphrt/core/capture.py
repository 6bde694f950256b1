"""`capture()`: warm-up and capture of every planned graph, undone where it must be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from graphrt.core.context import ForwardContext
from graphrt.core.descriptor import BatchDescriptor
from graphrt.core.frozen_gc import frozen_gc
from graphrt.core.modes import GraphMode
from graphrt.core.plan import StepPlan
from graphrt.core.pool import GraphPool
from graphrt.core.state import SavedState
from graphrt.core.transaction import CaptureTransaction
from graphrt.core.wrapper import GraphWrapper

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
    bind: Callable[[StepPlan, Phase], None],
    state: SavedState,
    capture_context: AbstractContextManager[object],
    publish: Callable[[PlannedGraph, GraphRecord, list[GraphWrapper]], None],
    progress: Progress | None = None,
) -> None:
    """Capture `planned` in its order and publish each graph once all its wrappers have it.

    A graph that fails is rolled back and the error raised; those before it stay published.
    `state` is restored after every forward, so that each starts from it.
    """
    graphs = list(planned)
    with frozen_gc(), capture_context:
        for done, graph in enumerate(graphs):
            if progress is not None:
                progress(done, len(graphs), graph.descriptor)
            started = time.perf_counter()
            before = pool.bytes()
            try:
                for _ in range(warmups):
                    bind(graph.plan, "warmup")
                    _run(graph, ForwardContext(GraphMode.NONE, graph.descriptor))
                    state.restore()
                transaction = CaptureTransaction(graph.slot)
                bind(graph.plan, "capture")
                _capture_one(graph, transaction)
            finally:
                state.restore()
            after = pool.bytes()
            grown = None if before is None or after is None else after - before
            record = GraphRecord(graph.mode, graph.descriptor, time.perf_counter() - started, grown)
            publish(graph, record, transaction.wrappers)
        if progress is not None and graphs:
            progress(len(graphs), len(graphs), graphs[-1].descriptor)


def _capture_one(graph: PlannedGraph, transaction: CaptureTransaction) -> None:
    context = ForwardContext(graph.mode, graph.descriptor, capture=transaction)
    try:
        _run(graph, context)
    except BaseException as error:
        transaction.rollback()
        if hasattr(error, "add_note"):
            error.add_note(f"while capturing {graph.mode.name} [{graph.descriptor}]")
        raise


def _run(graph: PlannedGraph, context: ForwardContext) -> Any:
    with context:
        graph.plan.call(**graph.plan.arguments)
