"""FULL graphs of the V2 runner: vLLM's own loop of captures, with graphrt's graphs in it."""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch

from graphrt import BatchDescriptor, GraphMode, KeyedGraph
from graphrt.core.base.option_values import shown
from graphrt.errors import CaptureError
from graphrt.hosts.engine import StepTrials
from graphrt.hosts.table import FullKey
from graphrt.hosts.vllm._state import state
from graphrt.hosts.vllm.trials import trials
from graphrt.hosts.vllm.wrapper import check_config, offloading


class FullGraph:
    """Stands in for a `torch.cuda.CUDAGraph`: vLLM keeps it and calls `replay`. The graph is
    destroyed with it; `filled` says whether one was captured."""

    __slots__ = ("__weakref__", "_trials", "filled", "replay")

    def __init__(self) -> None:
        self.filled = False
        # Those of its graph; None without.
        self._trials: StepTrials | None = None
        self.replay: Callable[[], Any] = _not_captured

    def capture(
        self,
        handle: Any,
        forward: Callable[[], Any],
        descriptor: BatchDescriptor,
        manager: Any = None,
    ) -> None:
        """Capture `forward`, which leaves its results in buffers, in vLLM's pool of that handle;
        the report names it by `descriptor`. All graphs of a `manager` run one model."""
        from vllm.distributed.device_communicators.pynccl_allocator import set_graph_pool_id

        pool = state.pools.use(handle, self)
        if handle is not None:
            set_graph_pool_id(handle)
        graphs = pool.keyed(_joined(offloading()), trials)
        key = FullKey(next(_keys), descriptor)
        # A worker that ends in the capture names this graph.
        state.table.latest = state.table.row(GraphMode.FULL, descriptor)
        graph: KeyedGraph = graphs.capture(key, forward, kind=manager)
        weakref.finalize(self, graphs.drop, key).atexit = False
        self.replay, self.filled = _counting(graph, descriptor), True
        self._trials = graph.trials

    @property
    def in_quarantine(self) -> bool:
        """Whether a trial has failed."""
        return self._trials is not None and self._trials.has_failed


_keys = itertools.count()


def _counting(graph: KeyedGraph, descriptor: BatchDescriptor) -> Callable[[], Any]:
    """The replay of a graph, which counts its steps."""
    table, replay = state.table, graph.replay
    row = table.row(GraphMode.FULL, descriptor)

    def counted() -> Any:
        row.steps += 1
        table.latest = row
        return replay()

    return counted


def _model_in(create_forward_fn: Any) -> Any:
    """The model that the function of vLLM's runs, or None. What else it holds, such as vLLM's
    manager and its graphs, changes without an effect on a graph."""
    is_function = isinstance(create_forward_fn, FunctionType)
    held = inspect.getclosurevars(create_forward_fn).nonlocals if is_function else {}
    return held.get("model")


def _not_captured() -> None:
    raise CaptureError(
        "a graph was replayed that nothing was captured into", advice="let vLLM capture again"
    )


def _joined(hooks: Any) -> Any:
    """The hook at the end of a capture alone: vLLM itself waits for its offloader elsewhere."""
    return None if hooks is None else _Join(hooks.end_of_capture)


class _Join:
    """Hooks of which only the end of a capture does something: it calls `join`."""

    def __init__(self, join: Callable[[], object]) -> None:
        self.end_of_capture = join

    def before_capture(self) -> None:
        """vLLM has waited already."""

    def before_replay(self) -> None:
        """vLLM has waited already."""


class TorchWithGraphs:
    """`torch`, as a module of vLLM's sees it, with another `cuda.CUDAGraph` and `cuda.graph`."""

    def __init__(self, new_graph: Callable[..., Any], capturing: Callable[..., Any]) -> None:
        self.cuda = _CudaWithGraphs(new_graph, capturing)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _CudaWithGraphs:
    """`torch.cuda` with another `CUDAGraph` and `graph`."""

    def __init__(self, new_graph: Callable[..., Any], capturing: Callable[..., Any]) -> None:
        self.CUDAGraph = new_graph
        self.graph = capturing

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class FullCaptures:
    """Captures FULL graphs by graphrt, in the manager of the V2 runner.

    vLLM opens `torch.cuda.graph` around one call of the forward that `create_forward_fn` returned.
    Here that block opens no capture, and graphrt captures the call inside of it.
    """

    def __init__(self) -> None:
        # vLLM's manager whose `capture` runs, and its descriptor of the forward created last.
        self._manager: Any = None
        self._key: Any = None
        # The graph of the open `torch.cuda.graph` block, and vLLM's handle of its pool.
        self._open: FullGraph | None = None
        self._handle: Any = None

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`CudaGraphManager.capture`, served."""

        @functools.wraps(original)
        def capture(manager: Any, create_forward_fn: Any, *args: Any, **kwargs: Any) -> Any:
            outer = self._manager, self._key, state.model
            check_config(getattr(manager, "vllm_config", None))
            try:
                self._manager, state.model = manager, _model_in(create_forward_fn)
                state.weights.managers.add(manager)
                return original(manager, partial(self._create, create_forward_fn), *args, **kwargs)
            finally:
                self._manager, self._key, state.model = outer

        return capture

    def new_graph(self, *args: Any, **kwargs: Any) -> Any:
        """For `torch.cuda.CUDAGraph()`; vLLM's own for micro-batches, which it captures across
        several threads."""
        if self._manager is None or getattr(self._key, "num_ubatches", 1) > 1:
            return torch.cuda.CUDAGraph(*args, **kwargs)
        return FullGraph()

    @contextmanager
    def capturing(self, graph: Any, pool: Any = None, **kwargs: Any) -> Iterator[None]:
        """For `torch.cuda.graph(graph, pool)`."""
        if not isinstance(graph, FullGraph):
            with torch.cuda.graph(graph, pool, **kwargs):
                yield
            return
        self._open, self._handle = graph, pool
        try:
            yield
        finally:
            self._open = self._handle = None
        if not graph.filled:
            raise CaptureError(
                "vLLM captured no forward where one was expected",
                got=shown(self._key),
                expected="a call of what create_forward_fn() has returned",
                advice="report it, with the version of vLLM",
            )

    def _create(self, create_forward_fn: Any, *args: Any, **kwargs: Any) -> Any:
        self._key = args[0] if args else kwargs["desc"]
        created = create_forward_fn(*args, **kwargs)
        # vLLM 0.24 returns the forward and the state of its attention.
        if isinstance(created, tuple):
            return (partial(self._run, created[0]), *created[1:])
        return partial(self._run, created)

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        graph = self._open
        if graph is None:
            return forward(*args, **kwargs)
        state.pools.largest = max(state.pools.largest, self._key.num_tokens)
        key = self._key
        descriptor = BatchDescriptor(key.num_tokens, getattr(key, "num_reqs", None), variant=key)
        run = partial(forward, *args, **kwargs)
        return graph.capture(self._handle, run, descriptor, self._manager)
