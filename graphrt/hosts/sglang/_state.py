"""The state of a process that serves SGLang: its pools, captures, steps, and eager steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from graphrt import BatchDescriptor, GraphPool, Reason, RunnerReport
from graphrt.hosts.engine import EagerSteps, session_in
from graphrt.hosts.table import Table

# A child of SGLang's: its handlers print it.
logger = logging.getLogger("sglang.graphrt")


class State:
    """What one process needs to serve SGLang."""

    def __init__(self) -> None:
        self.table, self.eager = Table(), EagerSteps(logger)
        # SGLang's handle of a pool -> graphrt's pool over it.
        self._pools: dict[Any, GraphPool] = {}
        self._capturing = False
        self.live: Any = None
        """SGLang's batch of the present step."""
        self.has_failed = False
        """Whether a trial of any graph has failed."""
        self.why_eager: tuple[Reason, str] | None = None
        """Why the step that begins has no graph, where it is not SGLang's choice."""

    def pool(self, handle: Any) -> GraphPool:
        """The pool over a handle of SGLang's: its runners share one."""
        pool = self._pools.get(handle)
        if pool is None:
            pool = self._pools[handle] = GraphPool(handle=handle)
            pool.on_capture = lambda wrapper, descriptor: self.table.captured(
                wrapper.runtime_mode, of_shape(descriptor.variant), wrapper.pool
            )
        return pool

    @property
    def has_graphs(self) -> bool:
        """Whether steps may have graphs: before that they are warm-ups, and so are captures'."""
        return not self._capturing and any(pool.captures for pool in self._pools.values())

    @contextmanager
    def session(self, pool: GraphPool, stream: Any) -> Iterator[None]:
        """A runner of SGLang's captures."""
        before = pool.captures
        self.table.begin()
        with session_in(pool, self.table, stream) as session:
            self._capturing = True
            try:
                yield
                self.table.end()
            finally:
                self._capturing = False
        grown = session.pool_bytes
        memory = "" if grown is None else f", {grown / 2**20:.1f} MiB"
        logger.info("graphrt captured %d graphs%s", pool.captures - before, memory)

    def report(self) -> RunnerReport:
        """What is captured in this process, and how its steps ran."""
        return self.table.report(self.eager.reasons, list(self._pools.values()))


def of_shape(key: Any) -> BatchDescriptor:
    """The batch of a key: the runner of SGLang's, and its shape."""
    return BatchDescriptor(max(key[1].size, 1), variant=key)


state = State()
