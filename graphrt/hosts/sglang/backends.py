"""SGLang's Full and Breakable backends with graphrt's captures and replays.

SGLang's runners drive a backend as before: they open a session, warm each shape up, capture it, and
replay it by its key. SGLang's constructors and pool are kept.
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
from graphrt.hosts.sglang.versions import CONTEXT, OF_BACKENDS
from graphrt.lowlevel import OutputBuffer

WARM_UPS = 2


class _Backend:
    """First base of our class, SGLang's backend is the second. For a runner that graphrt does not
    serve the methods of SGLang's run."""

    _device_module: Any
    _tp_group: Any
    _pool: Any
    _graphs: dict[Any, Any]
    _shared: GraphPool

    def __init__(self, cuda_graph_runner: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cuda_graph_runner, *args, **kwargs)  # type: ignore[call-arg]
        self._runner = cuda_graph_runner
        why = next(_why_own(cuda_graph_runner, self), "")
        if why:
            runner, base = type(cuda_graph_runner).__name__, type(self).__bases__[-1]
            logger.warning("graphrt: %s keeps SGLang's own graphs: %s", runner, why)
            own = {name: getattr(base, name) for name in OF_BACKENDS}
            # Still of the class by which SGLang's runners tell backends apart.
            self.__class__ = type(base.__name__, (type(self),), {**own, "in_quarantine": _never})

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        with super().capture_session(stream):  # type: ignore[misc]
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
        forward = self._prepared(forward_fn)
        for _ in range(WARM_UPS):
            self._device_module.synchronize()
            self._tp_group.barrier()
            forward()
            if post_warmup_hook is not None:
                post_warmup_hook()
        # Two runners of one pool may have graphs of the same shape.
        key = type(self._runner).__name__, shape_key
        self._graphs[shape_key] = self._captured(key, forward, capture_inputs)

    def _prepared(self, forward: Callable[[], Any]) -> Callable[[], Any]:
        return forward

    def _captured(self, key: Any, forward: Callable[[], Any], inputs: Any) -> Any:
        raise NotImplementedError


def _never(backend: Any, size: int) -> bool:
    return False


class _Full(_Backend):
    _keyed: KeyedGraphs | None = None

    def _captured(self, key: Any, forward: Callable[[], Any], inputs: Any) -> Any:
        if self._keyed is None:
            make = functools.partial(trials_of, self._runner)
            self._keyed = KeyedGraphs(self._shared, trials=make)
        # Not before the warm-ups, whose hook may replace the metadata.
        run = Forward(forward, importlib.import_module(CONTEXT))
        graph = self._keyed.capture(key, run, kind=self._runner)
        return graph.replay, state.table.row(GraphMode.FULL, of_shape(key)), graph.trials

    def in_quarantine(self, size: int) -> bool:
        """Whether a graph of so many requests has failed a trial."""
        return any(
            key.size == size and trials is not None and trials.has_failed
            for key, (_, _, trials) in self._graphs.items()
        )

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
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

    _wrapper: Any = None
    # The step of the present replay, and the forward of the present capture.
    _step: ForwardContext | None = None
    _forward: Callable[[], Any]

    def _prepared(self, forward: Callable[[], Any]) -> Callable[[], Any]:
        # All sizes and runners of a model share a buffer. Runners of a draft have another: they
        # step while outputs of the target are read.
        buffer = vars(self._runner.model_runner).setdefault("graphrt_outputs", OutputBuffer())
        body = eager_break(forward) if self._debug_eager else forward
        return lambda: buffer.hold(body())

    def _captured(self, key: Any, forward: Callable[[], Any], inputs: Any) -> Any:
        if self._wrapper is None:
            self._wrapper = wrapper_class(current_platform())(
                lambda: self._forward(),
                GraphMode.PIECEWISE,
                pool=self._shared,
                read_context=lambda: self._step,
                options=GraphOptions(lazy=True),
                breakable=True,
            )
        step, self._forward = ForwardContext(GraphMode.PIECEWISE, of_shape(key)), forward
        row = state.table.row(step.mode, of_shape(key))
        self._run(step)
        return step, row, inputs  # which the graph reads

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        step, row, _ = self._graphs[shape_key]
        row.steps += 1
        return self._run(step)

    def _run(self, step: ForwardContext) -> Any:
        self._step = step
        step.begin_step()
        try:
            return self._wrapper()
        finally:
            self._step = None

    def cleanup(self) -> None:
        if self._wrapper is not None:
            self._wrapper.clear_graphs()
        super().cleanup()  # type: ignore[misc]


def _why_own(runner: Any, backend: Any) -> Iterator[str]:
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
def backend_type(base: Any) -> Any:
    """The class that stands for one of SGLang's, which has "Full" or "Breakable" in its name."""
    kind = _Full if "Full" in base.__name__ else _Breakable
    return type(f"Graphrt{base.__name__}", (kind, base), {"__module__": __name__})
