"""Putting graphrt into the SGLang of this process, and taking it out again."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from graphrt import Reason
from graphrt.core.base.option_values import shown
from graphrt.core.batch.modes import graphs_off
from graphrt.errors import UnsupportedHostError
from graphrt.hosts.sglang._state import logger, state
from graphrt.hosts.sglang.backends import breakable_type, full_type, quarantining
from graphrt.hosts.sglang.breaks import breaking, marked_functions, marking
from graphrt.hosts.sglang.versions import (
    BREAKABLE,
    BREAKS,
    DECODE,
    FULL,
    MODEL_RUNNER,
    check,
    marked_code,
)

SWITCH = "GRAPHRT_SGLANG"

_undo: list[Callable[[], object]] = []


def asked() -> bool:
    """Whether GRAPHRT_SGLANG is 1; raises `UnsupportedHostError` if it is neither that nor 0."""
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise UnsupportedHostError(
            f"{SWITCH} is a switch", got=shown(value), expected="0 or 1", advice=f"{SWITCH}=1"
        )
    return value == "1"


def install_into_sglang() -> None:
    """See `graphrt.hosts.sglang.install`."""
    if _undo:
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
    while _undo:
        _undo.pop()()


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


def _replace(owner: Any, name: str, value: Any) -> None:
    _undo.append(functools.partial(setattr, owner, name, vars(owner)[name]))
    setattr(owner, name, value)


def _rebind(name: str, old: Any, new: Any) -> None:
    """Replace an object of SGLang's wherever one of its modules has it by this name."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "sglang" and vars(module).get(name) is old:
            _replace(module, name, new)
