"""vLLM's `CUDAGraphWrapper` with graphrt's captures and replays: pieces, and FULL on V1."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from graphrt import ForwardContext, GraphOptions, SegmentHooks, wrapper_class
from graphrt import current_platform as device_platform
from graphrt.errors import UnsupportedHostError
from graphrt.hosts.vllm._state import state
from graphrt.hosts.vllm.trials import trials


def step_reader() -> Callable[[], ForwardContext | None]:
    """A function that returns graphrt's context of the current step, from vLLM's; None outside of a
    step."""
    import vllm.forward_context as module

    read = state.steps.read

    def read_step() -> ForwardContext | None:
        current = module._forward_context
        if current is None:
            return None
        try:
            if (
                current.graphrt_descriptor is current.batch_descriptor
                and current.graphrt_mode is current.cudagraph_runtime_mode
            ):
                return current.graphrt_step  # type: ignore[no-any-return]
        except AttributeError:
            pass  # the first read of this context
        return read(current)

    return read_step


def graph_options(vllm_config: Any) -> GraphOptions:
    """Options of wrappers: lazy captures, and arguments compared at every replay if vLLM debugs."""
    debugging = logging.getLogger("vllm").isEnabledFor(logging.DEBUG)
    # With LoRA a graph reads a flag on the host that says whether adapters are active. It may be
    # baked in, as vLLM has separate graphs for batches with adapters.
    has_lora = getattr(vllm_config, "lora_config", None) is not None
    return GraphOptions(
        lazy=True,
        check="always" if debugging else "capture",
        host_arguments="bake" if has_lora else "refuse",
    )


class _Offloading:
    """vLLM's offloader copies weights on a stream of its own, which a capture must join."""

    def __init__(self, offloader: Any) -> None:
        self.before_capture = self.before_replay = offloader.sync_prev_onload
        self.end_of_capture = offloader.join_after_forward


def offloading() -> SegmentHooks | None:
    """Hooks around each graph for vLLM's weight offloader; None if it offloads nothing."""
    from vllm.model_executor.offloader.base import NoopOffloader, get_offloader

    offloader = get_offloader()
    return None if isinstance(offloader, NoopOffloader) else _Offloading(offloader)


def check_config(vllm_config: Any) -> None:
    """Raise `UnsupportedHostError` for what graphrt cannot serve in this configuration, which is
    that of captures from now on."""
    state.config = vllm_config
    if getattr(vllm_config, "use_cumem_cudagraph_pool", False) is True:
        raise UnsupportedHostError(
            "graphrt does not capture into memory that sleep mode offloads",
            got="sleep_mode_offload_cudagraph=True",
            expected="sleep mode without it: graphs then stay where they are while vLLM sleeps",
            advice="leave sleep_mode_offload_cudagraph out, or GRAPHRT_VLLM",
        )


class _PoolAndEntries:
    """The attributes of a wrapper that vLLM reads and assigns; the first base, before
    `GraphWrapper`."""

    _handle: Any
    entries: Any
    clear_graphs: Callable[[], None]
    move_to: Callable[[Any], None]

    @property
    def graph_pool(self) -> Any:
        """vLLM's handle of the pool; setting another one moves later captures to its pool."""
        return self._handle

    @graph_pool.setter
    def graph_pool(self, handle: Any) -> None:
        if handle != self._handle:
            self.clear_graphs()
            self.move_to(state.pools.use(handle, self).graphs)
            old_handle, self._handle = self._handle, handle
            state.pools.leave(old_handle, self)

    @property
    def concrete_cudagraph_entries(self) -> Any:
        """What is captured, by vLLM's descriptor. To assign anything destroys it."""
        return {descriptor.variant: entry for descriptor, entry in self.entries.items()}

    @concrete_cudagraph_entries.setter
    def concrete_cudagraph_entries(self, entries: Any) -> None:
        self.clear_graphs()


@functools.cache
def wrapper_type() -> Any:
    """The class, which is one of vLLM's and one of graphrt's for the current device."""
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.platforms import current_platform

    device_wrapper: Any = wrapper_class(device_platform())
    read_step = step_reader()

    class GraphrtWrapper(_PoolAndEntries, device_wrapper, CUDAGraphWrapper):  # type: ignore[misc]
        """vLLM's constructor, pool and clean-up; graphrt's calls."""

        unwrap = CUDAGraphWrapper.unwrap

        def __init__(
            self,
            runnable: Callable[..., Any],
            vllm_config: Any,
            runtime_mode: Any,
            cudagraph_options: Any = None,
        ) -> None:
            """Raises `InvalidModeError` for mode NONE. `cudagraph_options` change nothing: graphrt
            never collects garbage in a capture, and always keeps weak references alone."""
            check_config(vllm_config)
            self.vllm_config = vllm_config
            self.compilation_config = vllm_config.compilation_config
            self.cudagraph_options = cudagraph_options
            self.first_run_finished = False
            self._handle = current_platform.get_global_graph_pool()
            device_wrapper.__init__(
                self,
                runnable,
                runtime_mode.name,
                pool=state.pools.use(self._handle, self).graphs,
                read_context=read_step,
                options=graph_options(vllm_config),
                hooks=offloading(),
                trials=trials(),
            )
            CUDAGraphWrapper._all_instances.add(self)

    return GraphrtWrapper
