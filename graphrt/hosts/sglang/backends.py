"""SGLang's Full and Breakable backends with graphrt's captures and replays.

SGLang's runners drive a backend as before: they open a session, warm each shape up, capture it, and
replay it by its key. SGLang's constructors, pool and output buffer are kept.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from graphrt import (
    ForwardContext,
    GraphMode,
    GraphOptions,
    GraphPool,
    KeyedGraphs,
    Reason,
    current_platform,
    eager_break,
    wrapper_class,
)
from graphrt.hosts.sglang._state import logger, of_shape, state
from graphrt.hosts.sglang.trials import Forward, trials_of
from graphrt.hosts.sglang.versions import CONTEXT

WARM_UPS = 2


class _Backend:
    """Before a class of SGLang's, which it defers to where graphrt does not serve a runner."""

    _device_module: Any
    _tp_group: Any
    _pool: Any
    _graphs: dict[Any, Any]

    def __init__(self, cuda_graph_runner: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cuda_graph_runner, *args, **kwargs)  # type: ignore[call-arg]
        self._runner = cuda_graph_runner
        self._shared: GraphPool | None = None
        self._why_own = next(_why_own(cuda_graph_runner, self, kwargs), "")
        if self._why_own:
            logger.warning("graphrt: %s keeps SGLang's own graphs: %s", self, self._why_own)

    def __repr__(self) -> str:
        return f"the {type(self).__name__} of {type(self._runner).__name__}"

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        with super().capture_session(stream):  # type: ignore[misc]
            if self._why_own:
                yield
                return
            self._shared = state.pool(self._pool)
            self._shared.after_segment = self._tp_group.barrier
            with state.session(self._shared, stream):
                yield

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        if self._why_own:
            super().capture_one(  # type: ignore[misc]
                shape_key, forward_fn, capture_inputs, post_warmup_hook
            )
            return
        result = None
        for _ in range(WARM_UPS):
            self._device_module.synchronize()
            self._tp_group.barrier()
            result = forward_fn()
            if post_warmup_hook is not None:
                post_warmup_hook()
        self._capture(shape_key, forward_fn, result, capture_inputs)

    def _capture(
        self, shape_key: Any, forward_fn: Callable[[], Any], result: Any, inputs: Any
    ) -> None:
        raise NotImplementedError


class _Full(_Backend):
    _keyed: KeyedGraphs | None = None

    def _capture(
        self, shape_key: Any, forward_fn: Callable[[], Any], result: Any, inputs: Any
    ) -> None:
        assert self._shared is not None
        if self._keyed is None:
            make = functools.partial(trials_of, self._runner)
            self._keyed = KeyedGraphs(self._shared, trials=make)
        # Two runners of one pool may have graphs of the same shape.
        key = type(self._runner).__name__, shape_key
        forward = Forward(forward_fn, importlib.import_module(CONTEXT))
        graph = self._keyed.capture(key, forward)
        self._graphs[shape_key] = graph.replay, state.row(GraphMode.FULL, key), graph.trials

    def in_quarantine(self, size: int) -> bool:
        """Whether a graph of so many requests has failed a trial."""
        return not self._why_own and any(
            key.size == size and trials is not None and trials.has_failed
            for key, (_, _, trials) in self._graphs.items()
        )

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        if self._why_own:
            return super().replay(shape_key, static_forward_batch, **kwargs)  # type: ignore[misc]
        replay, row, _ = self._graphs[shape_key]
        row.steps += 1
        state.live = static_forward_batch
        return replay()

    def cleanup(self) -> None:
        if self._keyed is not None:
            self._keyed.clear_graphs()
        super().cleanup()  # type: ignore[misc]


class _Breakable(_Backend):
    _debug_eager: bool
    _shared_output_buffer: Any
    _capture_inputs: dict[Any, Any]
    _alloc_full_buffer: Callable[..., Any]
    _output_rows: Callable[..., int]
    _copy_output_to_buffer: Callable[..., None]
    _slice_output: Callable[..., Any]

    # The step of the present replay.
    _step: ForwardContext | None = None

    def _capture(
        self, shape_key: Any, forward_fn: Callable[[], Any], result: Any, inputs: Any
    ) -> None:
        assert self._shared is not None
        size = shape_key.size
        if self._shared_output_buffer is None:
            self._shared_output_buffer = self._alloc_full_buffer(result, size)
        buffer = self._shared_output_buffer
        body = eager_break(forward_fn) if self._debug_eager else forward_fn

        def forward() -> Any:
            output = body()
            rows = self._output_rows(output, size)
            self._copy_output_to_buffer(output, buffer, rows)
            return self._slice_output(buffer, rows)

        key = type(self._runner).__name__, shape_key
        step = ForwardContext(GraphMode.PIECEWISE, of_shape(key))
        wrapper = wrapper_class(current_platform())(
            forward,
            GraphMode.PIECEWISE,
            pool=self._shared,
            read_context=lambda: self._step,
            options=GraphOptions(lazy=True),
            breakable=True,
        )
        row = state.row(step.mode, key)
        self._capture_inputs[shape_key] = inputs
        self._run(step, wrapper)
        self._graphs[shape_key] = step, wrapper, row

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        if self._why_own:
            return super().replay(shape_key, static_forward_batch, **kwargs)  # type: ignore[misc]
        step, wrapper, row = self._graphs[shape_key]
        row.steps += 1
        return self._run(step, wrapper)

    def _run(self, step: ForwardContext, wrapper: Any) -> Any:
        self._step = step
        step.begin_step()
        try:
            return wrapper()
        finally:
            self._step = None

    def cleanup(self) -> None:
        if not self._why_own:
            for _, wrapper, _ in self._graphs.values():
                wrapper.clear_graphs()
        super().cleanup()  # type: ignore[misc]


def _why_own(runner: Any, backend: Any, options: dict[str, Any]) -> Iterator[str]:
    """Reasons to leave a runner its own graphs."""
    if getattr(getattr(backend, "_memory_saver_adapter", None), "enabled", False):
        yield "they are in memory of its memory saver (SGLANG_MEMORY_SAVER_CUDA_GRAPH)"
    if getattr(runner, "enable_pdmux", False):
        yield "it captures on several groups of streams (enable_pdmux)"
    if str(getattr(runner.model_runner, "device", "cuda")) not in ("cuda", "cpu"):
        yield f"it runs on {runner.model_runner.device}"


def quarantining(original: Callable[..., Any]) -> Callable[..., Any]:
    """`DecodeCudaGraphRunner.can_run_graph`: SGLang runs batches of a failed graph eagerly. Its
    `can_run` of a backend is not asked where batches are padded."""

    @functools.wraps(original)
    def can_run_graph(runner: Any, forward_batch: Any) -> Any:
        can_run = original(runner, forward_batch)
        if can_run and state.has_failed and isinstance(runner.backend, _Full):
            requests = runner._pad_to_bucket(forward_batch.batch_size, runner.capture_bs)
            tokens = requests * runner.captured_req_width
            size = runner._capture_graph_size(bs=requests, num_tokens=tokens)
            if runner.backend.in_quarantine(size):
                state.why_eager = Reason.QUARANTINED, f"the graph of {size} is in quarantine"
                return False
        return can_run

    return can_run_graph


@functools.cache
def full_type(base: Any) -> Any:
    """The class that stands for SGLang's `FullCudaGraphBackend`."""
    return type("GraphrtFullBackend", (_Full, base), {"__module__": __name__})


@functools.cache
def breakable_type(base: Any) -> Any:
    """The class that stands for SGLang's `BreakableCudaGraphBackend`."""
    return type("GraphrtBreakableBackend", (_Breakable, base), {"__module__": __name__})
