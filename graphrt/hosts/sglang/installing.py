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
from graphrt.hosts.sglang.backends import breakable_type, full_type, quarantining
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
_replace, _rebind = _replaced.replace, _replaced.rebind


def asked() -> bool:
    """Whether GRAPHRT_SGLANG is 1."""
    return switched_on(SWITCH)


def install_into_sglang() -> None:
    """See `graphrt.hosts.sglang.install`."""
    if _replaced:
        return
    sglang = importlib.import_module("sglang")
    check(sglang.__version__)
    if graphs_off():
        logger.info("graphrt: GRAPHRT_MODE=NONE, so SGLang keeps its own graphs")
        return
    breaks = importlib.import_module(BREAKS)
    code = marked_code(breaks.eager_on_graph)
    assert code is not None
    full = importlib.import_module(FULL).FullCudaGraphBackend
    breakable = importlib.import_module(BREAKABLE).BreakableCudaGraphBackend
    runner = importlib.import_module(MODEL_RUNNER).ModelRunner
    decode = importlib.import_module(DECODE).DecodeCudaGraphRunner
    try:
        for module, name, marked in list(marked_functions(code)):
            _replace(module, name, breaking(marked))
        _rebind("eager_on_graph", breaks.eager_on_graph, marking(breaks.eager_on_graph, code))
        _rebind("FullCudaGraphBackend", full, full_type(full))
        _rebind("BreakableCudaGraphBackend", breakable, breakable_type(breakable))
        _replace(runner, "forward", _counting(runner.forward))
        _replace(decode, "can_run_graph", quarantining(decode.can_run_graph))
    except BaseException:  # an interrupt too leaves SGLang as it was
        uninstall()
        raise
    logger.info("graphrt captures and replays the graphs of SGLang %s", sglang.__version__)


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
            state.fell_back(*(state.why_eager or found_none))
        state.why_eager = None
        return output

    return forward
