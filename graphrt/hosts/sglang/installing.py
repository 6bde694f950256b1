"""Putting graphrt into the SGLang of this process, and taking it out again."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from graphrt import Reason
from graphrt.core.batch.modes import graphs_off
from graphrt.hosts.engine import Replaced, switched_on
from graphrt.hosts.sglang._state import logger, state
from graphrt.hosts.sglang.backends import backend_type, quarantining
from graphrt.hosts.sglang.breaks import breaking, marked_functions, marking
from graphrt.hosts.sglang.versions import (
    BREAKABLE,
    BREAKS,
    DECODE,
    FULL,
    MODEL_RUNNER,
    SWITCH,
    check,
    marked_code,
)

_replaced = Replaced("sglang")


def install() -> None:
    """Let graphrt capture and replay what SGLang's Full and Breakable backends capture, in this
    process, if GRAPHRT_SGLANG=1.

    (Entry point of `sglang.srt.plugins`; called again it changes nothing.) Raises
    `UnsupportedHostError` for an SGLang of another version, or one without the names that graphrt
    replaces: nothing is replaced then, and SGLang, which logs the error, keeps its own graphs.
    """
    if _replaced or not switched_on(SWITCH):
        return
    version = importlib.import_module("sglang").__version__
    check(version)
    if graphs_off():
        logger.info("graphrt: GRAPHRT_MODE=NONE, so SGLang keeps its own graphs")
        return
    mark = importlib.import_module(BREAKS).eager_on_graph
    code = marked_code(mark)
    assert code is not None
    runner = importlib.import_module(MODEL_RUNNER).ModelRunner
    decode = importlib.import_module(DECODE).DecodeCudaGraphRunner
    with _replaced.all_or_none():
        for module, name, marked in list(marked_functions(code)):
            _replaced.replace(module, name, breaking(marked))
        _replaced.rebind("eager_on_graph", mark, marking(mark, code))
        for module, kind in ((FULL, "Full"), (BREAKABLE, "Breakable")):
            base = getattr(importlib.import_module(module), f"{kind}CudaGraphBackend")
            _replaced.rebind(base.__name__, base, backend_type(base))
        _replaced.replace(runner, "forward", _counting(runner.forward))
        _replaced.replace(decode, "can_run_graph", quarantining(decode.can_run_graph))
    logger.info("graphrt captures and replays the graphs of SGLang %s", version)


def uninstall() -> None:
    """Give SGLang its own backends back: runners that are made from now on get them."""
    _replaced.put_back()


def _counting(original: Callable[..., Any]) -> Callable[..., Any]:
    """`ModelRunner.forward`, with its eager steps counted once there are graphs."""

    @functools.wraps(original)
    def forward(runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(runner, forward_batch, *args, **kwargs)
        if state.has_graphs and not output.can_run_graph:
            mode = forward_batch.forward_mode.name
            found_none = Reason.NO_GRAPH, f"SGLang found no graph for a batch ({mode})"
            state.eager.note(*(state.why_eager or found_none))
        state.why_eager = None
        return output

    return forward
