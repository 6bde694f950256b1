"""graphrt's pools for the graph pools of vLLM, and the sessions in which they capture."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from graphrt import (
    BatchDescriptor,
    CaptureSession,
    GraphPool,
    KeyedGraphs,
    SegmentHooks,
    WrapperTrials,
)
from graphrt.hosts.engine import session_in
from graphrt.hosts.table import Table
from graphrt.hosts.vllm.log import Captures

_INNER = "inner"


class SharedPool:
    """A `GraphPool` over a pool handle of vLLM's, and the graphs in it that vLLM names by keys."""

    def __init__(self, handle: Any, on_capture: Callable[[Any, BatchDescriptor], None]) -> None:
        """`handle` None: memory of its own."""
        self.graphs = GraphPool(handle=handle)
        self.graphs.on_capture = on_capture
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        """Wrappers and FULL graphs that capture into it."""
        # FULL graphs and those of encoders; None before the first.
        self._keyed: KeyedGraphs | None = None

    def keyed(
        self,
        hooks: SegmentHooks | None,
        trials: Callable[[], WrapperTrials | None] | None = None,
    ) -> KeyedGraphs:
        """The graphs of this pool that vLLM names by keys."""
        if self._keyed is None:
            self._keyed = KeyedGraphs(self.graphs, hooks=hooks, trials=trials)
        return self._keyed


class Pools:
    """graphrt's pools by vLLM's handles, and the capture session that is open in all of them.

    Each keeps a share of vLLM's allocator pool. Without it a pool that is empty between two
    captures would be gone, and nothing could be captured into it again.
    """

    def __init__(
        self, count: Callable[[Any], object], table: Table, on_end: Callable[[], object]
    ) -> None:
        """`count` is called with the wrapper that has captured something, `on_end` after a session
        of captures."""
        self._table = table
        self.on_end = on_end
        # vLLM's handle, or (_INNER, handle) -> graphrt's pool.
        self._pools: dict[Any, SharedPool] = {}
        self._count = count
        # The open session: its stack (None: no session), a session in each pool, vLLM's stream.
        self._stack: ExitStack | None = None
        self._sessions: list[CaptureSession] = []
        self._stream: Any = None
        self._captures = Captures()
        self.largest = 0
        """Tokens of the largest captured batch."""
        self.last: Any = None
        """The handle that was used last."""

    def use(self, handle: Any, user: Any, *, inner: bool = False) -> SharedPool:
        """The pool of a handle, used by `user` until `leave` or its end.

        With `inner` it is the pool beside it, with memory of its own, for graphs that are replayed
        while a step of the handle's pool is under way.
        """
        key = (_INNER, handle) if inner else handle
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = SharedPool(None if inner else handle, self._captured)
            self._join(pool)
        pool.users.add(user)
        if not inner:
            self.last = handle
        return pool

    def leave(self, handle: Any, user: Any) -> None:
        """Note that `user` captures into another pool from now on."""
        for key in (handle, (_INNER, handle)):
            pool = self._pools.get(key)
            if pool is not None:
                pool.users.discard(user)

    def close_unused(self, keep: Any) -> None:
        """Close the pools with captures that have no user any more, save that of the handle `keep`.

        vLLM profiles its memory, and captures its encoders, in pools that it forgets.
        """
        for handle, pool in list(self._pools.items()):
            if handle != keep and pool.graphs.captures and not len(pool.users):
                del self._pools[handle]
                pool.graphs.close()

    @property
    def capturing(self) -> bool:
        """Whether a session is open."""
        return self._stack is not None

    @property
    def captures(self) -> int:
        """How many captures there were in all open pools."""
        return sum(pool.graphs.captures for pool in self._pools.values())

    @property
    def steps(self) -> int:
        """How many steps ran in all open pools."""
        return sum(pool.graphs.generation for pool in self._pools.values())

    @property
    def graph_pools(self) -> list[GraphPool]:
        """graphrt's pools of all handles."""
        return [pool.graphs for pool in self._pools.values()]

    def clear(self) -> None:
        """Close all of them."""
        self._table.forget()
        for pool in self._pools.values():
            pool.graphs.close()
        self._pools.clear()
        self.largest = 0

    @contextmanager
    def session(self, stream: Any, *, is_told: bool = True) -> Iterator[None]:
        """Let lazy wrappers capture, on `stream`; the garbage collector does not run meanwhile.
        Unless `is_told` is False, the log and the file of the report are written after it."""
        if self._stack is not None:
            yield
            return
        began = time.perf_counter()
        self._captures = Captures()
        self._table.begin()
        with ExitStack() as stack:
            stack.callback(self._end)
            self._stack, self._stream = stack, stream
            for pool in list(self._pools.values()):
                self._join(pool)
            yield
            grown = [session.pool_bytes for session in self._sessions]
            total = None if None in grown else sum(each or 0 for each in grown)
            if is_told:
                self._captures.log(time.perf_counter() - began, total)
            self._table.end()
        if is_told:
            self.on_end()

    def _join(self, pool: SharedPool) -> None:
        if self._stack is not None:
            # Each of vLLM's managers captures on another stream.
            session = session_in(pool.graphs, self._table, self._stream)
            self._sessions.append(self._stack.enter_context(session))

    def _end(self) -> None:
        self._stack = self._stream = None
        self._sessions = []

    def _captured(self, wrapper: Any, descriptor: BatchDescriptor) -> None:
        self.largest = max(self.largest, descriptor.num_tokens)
        self._captures.add(wrapper.runtime_mode.name, descriptor)
        self._table.captured(wrapper.runtime_mode, descriptor, wrapper.pool)
        self._count(wrapper)
