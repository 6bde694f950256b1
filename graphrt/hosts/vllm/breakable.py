"""vLLM's breakable graphs: its marked functions are graphrt's eager breaks."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from graphrt import ForwardContext, GraphMode, eager_break, wrapper_class
from graphrt import current_platform as device_platform
from graphrt.errors import UnsupportedHostError
from graphrt.hosts.vllm._state import state
from graphrt.hosts.vllm.steps import InnerStep
from graphrt.hosts.vllm.trials import trials
from graphrt.hosts.vllm.wrapper import (
    check_config,
    graph_options,
    offloading,
    step_reader,
)
from graphrt.lowlevel import Recording, current_capture


class Breaks:
    """What vLLM's marked functions find as their open capture during a capture of graphrt's."""

    def __init__(self, capture: Recording) -> None:
        self._capture = capture

    @property
    def _capturing(self) -> bool:
        return self._capture.segment_open

    def add_eager(self, closure: Callable[[], Any]) -> Any:
        """End the segment, run what the closure calls, and begin another one."""
        function, args, kwargs = called_by(closure)
        return eager_break(function)(*args, **kwargs)


def called_by(closure: Any) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function and arguments that a closure of vLLM's calls: graphrt looks at the tensors."""
    cells = closure.__closure__ if isinstance(closure, types.FunctionType) else None
    names = closure.__code__.co_freevars if cells else ()
    values = {name: cell.cell_contents for name, cell in zip(names, cells or (), strict=True)}
    try:
        return values["fn"], values["weak_args"], values["weak_kwargs"]
    except KeyError as error:
        raise UnsupportedHostError(
            "a function that vLLM marked as a break is not called as graphrt knows it",
            got=", ".join(names) or repr(closure),
            expected="fn, weak_args, weak_kwargs",
            advice="a version of vLLM that this graphrt knows: see docs/how-to/vllm.md",
        ) from error


class _BreakableCalls:
    """The base before vLLM's class, which overrides its calls and its graphs."""

    runnable: Callable[..., Any]
    vllm_config: Any
    _read_step: Callable[[], ForwardContext | None]
    _breaks: Any
    """Where vLLM's marked functions look for the capture that is open."""

    def __init__(self, runnable: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        check_config(vllm_config)
        # Mode, and whether for an `InnerStep` -> graphrt's wrapper for it.
        self._inner: dict[tuple[GraphMode, bool], Any] = {}
        # vLLM's handle of the pool.
        self._handle: Any = None
        # The context of the present call, and its arguments that are None.
        self._step: ForwardContext | None = None
        self._left_out: dict[str, None] = {}
        super().__init__(runnable, vllm_config, *args, **kwargs)  # type: ignore[call-arg]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = self._read_step()
        if step is None or step.mode is GraphMode.NONE or not self._is_mine(step.mode):
            return self.runnable(*args, **kwargs)
        key_of = self.__dict__.get("key_fn")
        if key_of is not None:
            # By this key: a batch of the same shape may run other code.
            step = state.steps.keyed(step, key_of(*args, **kwargs))
        kind = step.mode, isinstance(step, InnerStep)
        inner = self._inner.get(kind)
        if inner is None:
            inner = self._inner[kind] = self._new_inner(*kind)
        self._step = step
        # vLLM passes None in some steps and nothing in others: to a graph both must be the same.
        self._left_out = {name: None for name, value in kwargs.items() if value is None}
        named = {name: value for name, value in kwargs.items() if value is not None}
        return inner(*args, **named)

    @property
    def graph_pool(self) -> Any:
        """vLLM's handle of the pool; setting another one moves later captures to its pool."""
        return self._handle

    @graph_pool.setter
    def graph_pool(self, handle: Any) -> None:
        old_handle, self._handle = self._handle, handle
        if old_handle is handle or old_handle == handle:
            return
        state.pools.use(handle, self)
        for (_, is_inner), inner in self._inner.items():
            inner.clear_graphs()
            inner.move_to(state.pools.use(handle, self, inner=is_inner).graphs)
        state.pools.leave(old_handle, self)

    @property
    def entries(self) -> dict[Any, Any]:
        """What is captured, by vLLM's descriptor, or that and the key of `key_fn`. To assign
        anything destroys it."""
        return {
            descriptor.variant: entry
            for inner in self._inner.values()
            for descriptor, entry in inner.entries.items()
        }

    @entries.setter
    def entries(self, entries: Any) -> None:
        self.clear_graphs()

    def clear_graphs(self) -> None:
        for inner in self._inner.values():
            inner.clear_graphs()

    def seal(self) -> None:
        """Capture nothing until the next session of captures."""
        for inner in self._inner.values():
            inner.seal()

    def _is_mine(self, mode: GraphMode) -> bool:
        only_mode = self.__dict__.get("runtime_mode")
        return only_mode is None or only_mode.name == mode.name

    def _new_inner(self, mode: GraphMode, is_inner: bool) -> Any:
        return wrapper_class(device_platform())(
            self._run,
            mode,
            pool=state.pools.use(self._handle, self, inner=is_inner).graphs,
            read_context=lambda: self._step,
            options=graph_options(self.vllm_config),
            breakable=True,
            hooks=offloading(),
            trials=trials(),
        )

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        kwargs |= self._left_out
        capture = current_capture()
        if capture is None or not capture.breakable:
            return self.runnable(*args, **kwargs)
        thread_local = self._breaks
        outer = getattr(thread_local, "active", None)
        try:
            thread_local.active = Breaks(capture)
            return self.runnable(*args, **kwargs)
        finally:
            thread_local.active = outer


@functools.cache
def breakable_type() -> Any:
    """The class that stands for vLLM's `BreakableCUDAGraphWrapper`."""
    from vllm.compilation import breakable_cudagraph as module

    class GraphrtBreakableWrapper(_BreakableCalls, module.BreakableCUDAGraphWrapper):  # type: ignore[misc]
        """Captures in whatever mode vLLM dispatches: in pieces, or FULL without breaks."""

        _read_step = staticmethod(step_reader())
        _breaks = module.BreakableCUDAGraphCapture._tls

    return GraphrtBreakableWrapper
