"""Putting graphrt into the vLLM of this process, and taking it out again."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from graphrt.core.batch.modes import graphs_off
from graphrt.errors import UnsupportedHostError
from graphrt.hosts.engine import Replaced, switched_on
from graphrt.hosts.names import is_known
from graphrt.hosts.vllm import while_serving
from graphrt.hosts.vllm._state import state
from graphrt.hosts.vllm.breakable import breakable_type
from graphrt.hosts.vllm.encoder import EncoderCaptures
from graphrt.hosts.vllm.ending import telling_of_the_end
from graphrt.hosts.vllm.full import FullCaptures, TorchWithGraphs
from graphrt.hosts.vllm.full_trials import FullTrials
from graphrt.hosts.vllm.log import logger
from graphrt.hosts.vllm.report_file import save_at_end
from graphrt.hosts.vllm.trials import is_on
from graphrt.hosts.vllm.versions import (
    BREAKABLE,
    CAPTURING_WHILE_SERVING,
    ENCODER,
    EXECUTOR,
    PARALLEL,
    PROFILE,
    RUNNER2,
    V1,
    V2,
    WORKER,
    WRAPPER,
    check_names,
    check_version,
)
from graphrt.hosts.vllm.wrapper import wrapper_type

SWITCH = "GRAPHRT_VLLM"

_replaced = Replaced("vllm")
_replace, _rebind = _replaced.replace, _replaced.rebind


def asked() -> bool:
    """Whether GRAPHRT_VLLM is 1."""
    return switched_on(SWITCH)


def install_into_vllm() -> None:
    """See `graphrt.hosts.vllm.install`."""
    if _replaced:
        return
    vllm = importlib.import_module("vllm")
    check_version(vllm.__version__)
    _check_platform()
    if graphs_off():
        logger.info("graphrt: GRAPHRT_MODE=NONE, vLLM runs without graphs")
        return
    share = while_serving.share_asked()
    if share and not is_known(vllm.__version__, CAPTURING_WHILE_SERVING):
        logger.info(
            "graphrt: all graphs are captured at the start, as this is vLLM %s", vllm.__version__
        )
        share = None
    check_names(vllm.__version__, while_serving=share is not None)
    counter = importlib.import_module("vllm.compilation.counter").compilation_counter
    wrapper = wrapper_type()

    def count(captured: Any) -> None:
        # FULL graphs of the V2 runner are counted by vLLM's own loop.
        if isinstance(captured, wrapper):
            counter.num_cudagraph_captured += 1

    def wrappers() -> list[Any]:
        kinds = _module(WRAPPER).CUDAGraphWrapper, _module(BREAKABLE).BreakableCUDAGraphWrapper
        made = [each for kind in kinds for each in list(kind._all_instances)]
        # Not those that vLLM has made of its own class before.
        return [each for each in made if isinstance(each, kinds)]

    state.count, state.weights.wrappers = count, wrappers
    full, encoder = FullCaptures(), EncoderCaptures()
    manager, v2 = _module(V2).CudaGraphManager, _module(V2)
    vision, budgets = _module(ENCODER), _module(ENCODER).EncoderCudaGraphManager
    with _replaced.all_or_none():
        own_session = _module(PARALLEL).graph_capture
        _rebind("graph_capture", own_session, _in_session(own_session))
        _rebind("CUDAGraphWrapper", _module(WRAPPER).CUDAGraphWrapper, wrapper)
        own_breakable = _module(BREAKABLE).BreakableCUDAGraphWrapper
        _rebind("BreakableCUDAGraphWrapper", own_breakable, breakable_type())
        _replace(manager, "capture", full.around(manager.capture))
        _replace(v2, "torch", TorchWithGraphs(full.new_graph, full.capturing))
        capture_budget = encoder.around(budgets._capture_budget_graph)
        _replace(budgets, "_capture_budget_graph", capture_budget)
        _replace(vision, "torch", TorchWithGraphs(encoder.new_graph, encoder.capturing))
        if is_on():
            trials, runner2 = FullTrials(), _module(RUNNER2).GPUModelRunner
            _replace(runner2, "execute_model", trials.around_step(runner2.execute_model))
            _replace(manager, "run_fullgraph", trials.around_replay(manager.run_fullgraph))
            _replace(manager, "dispatch", trials.around_dispatch(manager.dispatch))
        if share is not None:
            _capture_while_serving(manager, share)
        for runner in (_module(V1).GPUModelRunner, _module(RUNNER2).GPUModelRunner):
            _replace(runner, PROFILE, _closing_unused(vars(runner)[PROFILE]))
            _replace(runner, "capture_model", state.weights.captured(runner.capture_model))
            _replace(runner, "reload_weights", state.weights.compared(runner.reload_weights))
        worker = _module(WORKER).Worker
        transferred = state.weights.compared(worker.finish_weight_update)
        _replace(worker, "finish_weight_update", transferred)
        executor = sys.modules.get(EXECUTOR)
        if executor is not None:  # always in a worker of several, which comes from it
            monitor = telling_of_the_end(executor.WorkerProc.monitor_death_pipe)
            _replace(executor.WorkerProc, "monitor_death_pipe", monitor)
        save_at_end(state.report)
    state.serving = True
    logger.info("graphrt captures and replays the graphs of vLLM %s", vllm.__version__)


def uninstall() -> None:
    """Give vLLM its own graphs back: models that are wrapped from now on get vLLM's wrappers."""
    state.serving = False
    _replaced.put_back()


def _capture_while_serving(manager: Any, share: float) -> None:
    later = state.later
    later.share = share
    state.weights.destroyed = later.forget
    _replace(manager, "capture", later.around_manager(manager.capture))
    for runner in (_module(V1).GPUModelRunner, _module(RUNNER2).GPUModelRunner):
        _replace(runner, PROFILE, later.around_profile(vars(runner)[PROFILE]))
        _replace(runner, "capture_model", later.around_capture_model(runner.capture_model))
        _replace(runner, "execute_model", later.around_step(runner.execute_model))
    worker = _module(WORKER).Worker
    start = later.around_start(worker.compile_or_warm_up_model)
    _replace(worker, "compile_or_warm_up_model", start)


def _check_platform() -> None:
    current = importlib.import_module("vllm.platforms").current_platform
    # A platform of vLLM's has None for every name that it lacks.
    if not getattr(type(current), "serves_graphrt", False):
        raise UnsupportedHostError(
            "vLLM runs on a platform without graphrt",
            got=f"{type(current).__module__}.{type(current).__name__}",
            expected="NVIDIA GPUs, and graphrt_vllm as the one platform plugin",
            advice="let VLLM_PLUGINS name graphrt_vllm where it is set, remove other platform "
            "plugins, or leave GRAPHRT_VLLM unset",
        )


def _in_session(original: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's `graph_capture`, inside of which graphrt's wrappers capture, on its stream."""

    @functools.wraps(original)
    @contextmanager
    def graph_capture(*args: Any, **kwargs: Any) -> Iterator[Any]:
        from vllm.distributed.device_communicators.pynccl_allocator import set_graph_pool_id

        _close_unused()
        with original(*args, **kwargs) as context:
            if state.pools.last is not None:
                set_graph_pool_id(state.pools.last)
            with state.pools.session(context.stream):
                yield context

    return graph_capture


def _closing_unused(original: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's profiling of graph memory, whose pool is given back after it."""

    @functools.wraps(original)
    def profile(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            _close_unused()

    return profile


def _close_unused() -> None:
    current = importlib.import_module("vllm.platforms").current_platform
    state.pools.close_unused(keep=current.get_global_graph_pool())


def _module(name: str) -> Any:
    return importlib.import_module(name)
