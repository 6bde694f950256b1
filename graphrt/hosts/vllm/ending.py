"""The end of a worker: a line in vLLM's log with its rank and graph, and a limit of its time.

vLLM ends all workers of an engine if one of them dies, and names that one. The others then wait in
a collective, often inside of a graph, and no error of theirs says in which. A thread of the engine
kills them after some seconds. Where the engine fails in its next step, that thread ends with it,
and they would wait for ever, with their memory. So they end by themselves some seconds later.
"""

from __future__ import annotations

import faulthandler
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

from graphrt.hosts.vllm._state import state
from graphrt.hosts.vllm.log import logger

LATER_S = 10.0
"""How long a worker lives after the time that vLLM gives it: vLLM kills it 4 s after that."""
_STDERR = 2


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
    """`WorkerProc.monitor_death_pipe`, whose thread writes the line and sets the limit."""

    @functools.wraps(original)
    def monitor(worker: Any, death_pipe: Any, *args: Any, **kwargs: Any) -> Any:
        if death_pipe is not None:
            death_pipe = _ToldPipe(death_pipe, partial(_end, worker.rank))
        return original(worker, death_pipe, *args, **kwargs)

    return monitor


def _end(rank: int) -> None:
    from vllm import envs

    # Nothing of the device is asked for: it may wait for a dead rank, and this thread then too.
    row = state.table.latest
    if row is None:
        graph = "it has no graph yet"
    else:
        verb = "captures" if state.pools.capturing else "was last in"
        tokens = row.descriptor.num_tokens
        graph = f"it {verb} the {row.mode.name} graph for {tokens} tokens, {row.steps} steps so far"
    seconds = envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS + LATER_S
    logger.info("graphrt: rank %d ends, in %.0f s at the latest; %s", rank, seconds, graph)
    # A thread of C: it needs no lock of Python's, and tells where all threads are.
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
