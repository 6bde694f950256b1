"""`BatchGraphs`: the graphs of transformers' continuous batching, captured and replayed by graphrt.

transformers schedules and pads each batch, fills its static tensors, and knows a graph by a key of
the padded sizes. It asks for the graph of a key, and captures where it has none. Here it never has
one, so `Batches.run` gets each batch, in place of `ModelRunner._capture_graph`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from graphrt import GraphOptions, GraphPool, KeyedGraphs
from graphrt.core.base.log import logger
from graphrt.core.base.texts import error_line
from graphrt.core.batch.modes import graphs_off
from graphrt.errors import GraphRTError
from graphrt.hosts.advice import advise
from graphrt.hosts.transformers.reports import BatchReport, Counts
from graphrt.hosts.transformers.seam import Seam

_NO_ROOM = "no room for its graph under max_graphs or graph_bytes"


class BatchGraphs(Seam):
    """Serves the managers that a model makes for `generate_batch`; see `with_batch_graphs`."""

    def __init__(self, model: Any, options: GraphOptions) -> None:
        super().__init__(model)
        self._options = options
        # Why the last session has no graphs, of transformers' or ours; None if it has.
        self._off: str | None = None
        self._managers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._batches: weakref.WeakKeyDictionary[Any, Batches] = weakref.WeakKeyDictionary()

    def report(self) -> BatchReport:
        """Counts since `with_batch_graphs()`."""
        counts, limits = self._counts, [each.graphs.limit_report for each in self._each()]
        return BatchReport(
            counts.served,
            counts.captured,
            dict(counts.eager),
            self._refused or self._off,
            tuple(each for each in limits if each is not None),
        )

    def uninstall(self) -> None:
        for manager in self._managers:
            vars(manager).pop("_create_batch_processor", None)
        for batches in self._each():
            batches.close()
        super().uninstall()

    def _methods(self) -> dict[str, Callable[..., Any]]:
        return {"init_continuous_batching": self._init}

    def _capture(self, beside: Any) -> None:
        """Each graph is captured at the first batch of its key, whatever the adapters are."""

    def _release(self) -> None:
        for batches in self._each():
            batches.clear()
        self._by_adapters, self._captured = {}, None

    def _each(self) -> list[Batches]:
        return list(self._batches.values())

    def _init(self, *args: Any, **kwargs: Any) -> Any:
        """`init_continuous_batching`, whose manager is served."""
        manager = type(self.model).init_continuous_batching(self.model, *args, **kwargs)
        self._managers.add(manager)
        manager._create_batch_processor = partial(self._create, weakref.ref(manager))
        return manager

    def _create(self, reference: Callable[[], Any]) -> Any:
        """`_create_batch_processor`, which begins each session of a manager."""
        manager = reference()
        processor = type(manager)._create_batch_processor(manager)
        runner = processor.model_runner
        if runner.cache.device.type != "cpu":
            # transformers resets the inputs on this stream and copies those of the first batch on
            # another one, at once: on a busy GPU that batch then ran on zeros.
            torch.accelerator.current_stream(runner.cache.device).synchronize()
        self._look_at_model()
        if self._changed is not None or self._refused is not None:
            if self._batches and self._changed is not None:
                logger.warning("graphs are captured again: %s has changed", self._changed)
            self.capture(strict=False)
        off = None
        if not (runner.use_cuda_graph_varlen or runner.use_cuda_graph_decode):
            attention, device = self.model.config._attn_implementation, runner.cache.device.type
            off = f"transformers has them off for {attention} on {device}"
            advice = "ContinuousBatchingConfig(use_cuda_graph=True) turns them on, on a GPU"
            if off != self._off:
                logger.warning("generate_batch has no graphs: %s; %s", off, advice)
        elif self._refused is None and runner not in self._batches:
            self._batches[runner] = Batches(runner, self._options, self._counts)
        elif self._refused is not None and runner in self._batches:
            self._batches.pop(runner).close()
        self._off = off
        return processor


class Batches:
    """The graphs of one `ModelRunner`, whose batches `run` gets."""

    def __init__(self, runner: Any, options: GraphOptions, counts: Counts) -> None:
        io, limited = runner.inputs_and_outputs, options.max_graphs or options.graph_bytes
        # Graphs under a limit are in memory that comes back with them, and transformers' does not.
        self._memory = None if limited else runner.mem_pool
        self._pool = GraphPool(
            runner.cache.device.type,
            device=runner.cache.device,
            handle=None if self._memory is None else runner.graph_pool_id,
            stream=io.compute_stream,
        )
        self.graphs = KeyedGraphs(self._pool, options=options)
        self._io, self._counts, self._limited = io, counts, bool(limited)
        self._seen = set[Hashable]()
        # Key -> why its batches have no graph.
        self._refused = dict[Hashable, str]()
        runner._capture_graph, io.get_graph = self.run, _no_graph
        self._runner = weakref.ref(runner)
        # Also where Python ends: some versions of torch abort if a pool goes before its graphs.
        weakref.finalize(runner, _close, self._pool, self._memory)

    def run(self, forward_fn: Callable[..., Any], stream: Any, *args: Any) -> None:
        """Run a batch on transformers' stream: its results are in static tensors then."""
        key, forward = self._key(), partial(forward_fn, *args)
        if stream is not None:
            # Without async batching inputs are written on this stream, and no event says when.
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            if key in self.graphs:
                self.graphs[key].replay()
                self._counts.served += 1
            elif graphs_off() or key in self._refused:
                forward()
                self._counts.note(self._refused.get(key, "graphs are off"))
            else:
                self._first(key, forward)

    def _first(self, key: Hashable, forward: Callable[[], Any]) -> None:
        """Run a batch of a key without a graph, and capture its graph if the limit allows it."""
        is_new = key not in self._seen
        if is_new:
            # A warm-up, of which the results stay: a draw of random numbers is made once.
            with nullcontext() if self._memory is None else torch.cuda.use_mem_pool(self._memory):
                forward()
            self._seen.add(key)
        try:
            with self._pool.capture_session(uses_results=not is_new):
                if self._limited:
                    self.graphs.run(key, forward)
                else:
                    self.graphs.capture(key, forward, kind=self)
        except GraphRTError as error:
            advise(error)
            self._refused[key] = error_line(error)
            self._counts.note(self._refused[key])
            if not is_new:
                forward()
            return
        if key in self.graphs:
            self._counts.captured += 1
        else:
            self._counts.note(_NO_ROOM)

    def _key(self) -> Hashable:
        """transformers' key of the present batch. Its two sets of static tensors have their own."""
        io = self._io
        pairs = getattr(io, "io_pairs", None)
        if pairs is None:
            return (0, *io._get_graph_key())
        return (io.current_pair, *pairs[io.current_pair].device_io._get_graph_key())

    def clear(self) -> None:
        """Destroy the graphs; the next batches capture again."""
        self.graphs.clear_graphs()
        self._seen.clear()
        self._refused.clear()

    def close(self) -> None:
        """Destroy the graphs, and let the runner capture its own."""
        runner = self._runner()
        if runner is not None:
            vars(runner).pop("_capture_graph", None)
            vars(runner.inputs_and_outputs).pop("get_graph", None)
        self._pool.close()


def _close(pool: GraphPool, memory: Any) -> None:
    """Destroy the graphs of a pool, before the memory that they are in."""
    pool.close()


def _no_graph() -> None:
    """`get_graph` of a runner's inputs: each batch is given to `Batches.run`."""
