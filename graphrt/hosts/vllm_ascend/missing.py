"""A launched graph whose update never comes: an error with its key, not a device that hangs.

The next step raises it. But an engine waits for the device before its next step, to read its
tokens, and the graph never ends by itself:

1. `torch.npu.synchronize()` and its like raise it before they wait.
2. No call of torch or torch_npu tells before `tensor.cpu()` waits. So a thread looks once a second
   where the thread that launched is in its Python code, and ends the graph at the second look that
   finds it in the same copy to the host.
3. In any other wait the graph ends after a time-out.
"""

from __future__ import annotations

import dis
import functools
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from graphrt.ascend.waiting import WaitingStep
from graphrt.core.base.errors import GraphRTError
from graphrt.core.replay.pool import GraphPool

logger = logging.getLogger("vllm.graphrt")

TIMEOUT_S = 60.0
"""How long an update may take to come, where GRAPHRT_ASCEND_HANG_TIMEOUT_S is not set."""

Looks = weakref.WeakKeyDictionary[WaitingStep, tuple[float, tuple[int, int] | None]]
"""Step -> the time of its first look, and where its thread was at the last one."""

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
    looks: Looks = weakref.WeakKeyDictionary()
    while True:
        time.sleep(min(timeout_s / 8, 1.0))
        _look(looks, timeout_s)


def _look(looks: Looks, timeout_s: float) -> None:
    for pool, step in _waiting():
        now, frame = time.monotonic(), sys._current_frames().get(step.thread)
        place = None if frame is None else (id(frame), frame.f_lasti)
        since, place_before = looks.get(step, (now, None))
        looks[step] = since, place
        if frame is not None and place == place_before and _copies_to_host(frame):
            why = "its thread waits for a copy to the host"
        elif now - since >= timeout_s:
            why = f"no update came in {timeout_s} s"
        else:
            continue
        try:
            with pool.on_device():
                is_late = step.expire()
            if is_late:
                logger.error("graphrt: ended %r: %s; its outputs are worth nothing", step, why)
        except (GraphRTError, RuntimeError) as error:  # the device is lost: all calls are told
            logger.error("graphrt: %r cannot be ended: %s", step, error)


def _copies_to_host(frame: FrameType) -> bool:
    """Whether `frame` is in `x.cpu()`, `x.item()`, `x.tolist()` or `x.to("cpu")` of a variable `x`
    that is a tensor on an NPU, or prints one. False for a tensor that no variable holds."""
    if frame.f_code.co_filename.endswith("/torch/_tensor_str.py"):
        return any(_is_on_npu(each) for each in frame.f_locals.values())
    begun = [each for each in dis.get_instructions(frame.f_code) if each.offset <= frame.f_lasti]
    begun = [each for each in begun if each.opname != "PRECALL"]
    if begun and "CALL" in begun[-1].opname:
        begun.pop()
    constants = []
    while begun and begun[-1].opname in ("LOAD_CONST", "KW_NAMES"):
        constants.append(begun.pop().argval)
    if len(begun) < 2 or begun[-1].opname not in ("LOAD_ATTR", "LOAD_METHOD"):
        return False
    name, method = (each.argval for each in begun[-2:])
    if method in ("cpu", "item", "tolist") or (method == "to" and "cpu" in constants):
        return _is_on_npu(frame.f_locals.get(name, frame.f_globals.get(name)))
    return False


def _is_on_npu(value: object) -> bool:
    return type(value) is torch.Tensor and value.device.type == "npu"


def _waiting() -> Iterator[tuple[GraphPool, WaitingStep]]:
    for pool in list(pools.values()):
        step = pool.owner
        if isinstance(step, WaitingStep):
            yield pool, step
