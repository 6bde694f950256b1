"""A launched graph whose update never comes: an error with its key, not a device that hangs.

The next step raises it. But an engine waits for the device before its next step, to read its
tokens, and the graph never ends by itself. So waits of the host raise it first, and a thread ends
graphs that have waited for too long in a wait that Python does not see (`tensor.cpu()`).
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from graphrt.ascend.waiting import WaitingStep
from graphrt.core.base.errors import GraphRTError
from graphrt.core.replay.pool import GraphPool

logger = logging.getLogger("vllm.graphrt")

TIMEOUT_S = 60.0
"""How long an update may take to come, where GRAPHRT_ASCEND_HANG_TIMEOUT_S is not set."""

# By the engine's pool: wrappers of one model share memory, as they never run at the same time.
pools: weakref.WeakValueDictionary[Any, GraphPool] = weakref.WeakValueDictionary()


def refuse_waiting() -> None:
    """End the graphs that this thread launched and nobody updated; raises `MissingUpdateError` with
    the key of one."""
    for pool, step in _waiting():
        error = step.refusal(pool)
        if error is not None:
            raise error


def refusing_first(wait: Callable[..., Any]) -> Callable[..., Any]:
    """A wait of the host for the device that calls `refuse_waiting` before."""

    @functools.wraps(wait)
    def served(*args: Any, **kwargs: Any) -> Any:
        refuse_waiting()
        return wait(*args, **kwargs)

    return served


@functools.cache
def watch(timeout_s: float | None) -> threading.Thread:
    """A thread, one for the process, that ends graphs that have waited for `timeout_s`. Steps pay
    nothing for it."""
    thread = threading.Thread(
        target=_run, args=(timeout_s or TIMEOUT_S,), name="graphrt-updates", daemon=True
    )
    thread.start()
    return thread


def _run(timeout_s: float) -> None:
    # step -> for how long it was seen waiting. Pauses are counted, not the clock: a process that
    # was stopped (SIGSTOP) may update its step at once when it goes on.
    waited: weakref.WeakKeyDictionary[WaitingStep, float] = weakref.WeakKeyDictionary()
    pause_s = min(timeout_s / 8, 1.0)
    while True:
        time.sleep(pause_s)
        _look(waited, pause_s, timeout_s)


def _look(
    waited: weakref.WeakKeyDictionary[WaitingStep, float], pause_s: float, timeout_s: float
) -> None:
    for pool, step in _waiting():
        waited[step] = waited.get(step, -pause_s) + pause_s
        if waited[step] < timeout_s:
            continue
        try:
            with pool.on_device():
                is_late = step.expire()
            if is_late:
                text = "graphrt: ended %r after %s s; its outputs are worth nothing"
                logger.error(text, step, timeout_s)
        except (GraphRTError, RuntimeError) as error:  # the device is lost: all calls are told
            logger.error("graphrt: %r cannot be ended: %s", step, error)


def _waiting() -> Iterator[tuple[GraphPool, WaitingStep]]:
    for pool in list(pools.values()):
        step = pool.owner
        if isinstance(step, WaitingStep):
            yield pool, step
