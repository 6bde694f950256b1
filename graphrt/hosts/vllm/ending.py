"""The last line of a worker in vLLM's log: its rank, and the graph that it was in.

vLLM ends all workers of an engine if one of them dies, and names that one. The others then wait in
a collective, often inside of a graph, and no error of theirs says in which.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

from graphrt.hosts.vllm._state import state
from graphrt.hosts.vllm.log import logger


class _ToldPipe:
    """The pipe of vLLM's parent process, which closes where a worker is to end."""

    def __init__(self, pipe: Any, tell: Callable[[], None]) -> None:
        self._pipe = pipe
        self._tell = tell

    def recv(self) -> Any:
        """Wait for the end."""
        try:
            return self._pipe.recv()
        except EOFError:
            self._tell()
            raise


def telling_of_the_end(original: Callable[..., Any]) -> Callable[..., Any]:
    """`WorkerProc.monitor_death_pipe`, whose thread writes the line."""

    @functools.wraps(original)
    def monitor(worker: Any, death_pipe: Any, *args: Any, **kwargs: Any) -> Any:
        if death_pipe is not None:
            death_pipe = _ToldPipe(death_pipe, partial(_tell, worker.rank))
        return original(worker, death_pipe, *args, **kwargs)

    return monitor


def _tell(rank: int) -> None:
    # Nothing of the device is asked for: it may wait for a dead rank, and this thread then too.
    row = state.table.latest
    if row is None:
        graph = "it has no graph yet"
    else:
        verb = "captures" if state.pools.capturing else "was last in"
        tokens = row.descriptor.num_tokens
        graph = f"it {verb} the {row.mode.name} graph for {tokens} tokens, {row.steps} steps so far"
    logger.info("graphrt: rank %d ends; %s", rank, graph)
