"""vLLM's modules of graphs on a CPU: the published ones where they are installed, or a stand-in.

What vLLM asks CUDA for is answered by graphrt's CPU platform, whose graphs are tapes; vLLM's
kernels, and so its models and runners, are not there.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from graphrt import GraphPool
from graphrt.hosts.vllm import platform_type

NAMES = {
    "v1": "vllm.v1.worker.gpu_model_runner",
    "v2": "vllm.v1.worker.gpu.cudagraph_utils",
    "v2_runner": "vllm.v1.worker.gpu.model_runner",
    "encoder": "vllm.v1.worker.encoder_cudagraph",
    "breakable": "vllm.compilation.breakable_cudagraph",
    "wrappers": "vllm.compilation.cuda_graph",
    "counting": "vllm.compilation.counter",
    "contexts": "vllm.forward_context",
    "config": "vllm.config",
    "platforms": "vllm.platforms",
    "nccl": "vllm.distributed.device_communicators.pynccl_allocator",
}


IS_INSTALLED = importlib.util.find_spec("vllm") is not None
"""Whether the published vLLM is there."""


def platform_over(base: type) -> Any:
    """A platform of vLLM's for tests, with graphrt in it."""

    class AnyPlatform(base):  # type: ignore[misc,valid-type]
        device_type = "cpu"
        _global_graph_pool: Any = None

        @classmethod
        def get_static_graph_wrapper_cls(cls) -> str:
            return "vllm.compilation.cuda_graph.CUDAGraphWrapper"

        @classmethod
        def support_static_graph_mode(cls) -> bool:
            return True

        @classmethod
        def set_additional_forward_context(cls, **kwargs: Any) -> dict[str, Any]:
            return {}

        def get_global_graph_pool(self) -> Any:
            cls = type(self)
            cls._global_graph_pool = cls._global_graph_pool or self.graph_pool_handle()
            return cls._global_graph_pool

        def graph_pool_handle(self) -> Any:
            return GraphPool("cpu").handle

    return platform_type(AnyPlatform)()


def load() -> SimpleNamespace:
    """The modules that `install` looks at, by `NAMES`, with stand-ins for what needs a GPU.

    Of the published vLLM, it has to be called before anything of it is imported.
    """
    platforms = importlib.import_module("vllm.platforms")
    if IS_INSTALLED:
        interface = importlib.import_module("vllm.platforms.interface")
        kind = type("Base", (interface.Platform,), {"_enum": interface.PlatformEnum.UNSPECIFIED})
        if not hasattr(type(platforms._current_platform), "serves_graphrt"):
            platforms._current_platform = platform_over(kind)
        parallel = importlib.import_module("vllm.distributed.parallel_state")

        @contextmanager
        def graph_capture(device: torch.device) -> Iterator[Any]:
            yield SimpleNamespace(stream=None)

        if parallel.graph_capture.__module__ == parallel.__name__:
            parallel.graph_capture = graph_capture
    else:
        platforms.current_platform = platform_over(object)
    return SimpleNamespace(**{key: importlib.import_module(name) for key, name in NAMES.items()})


def config(sizes: list[int], mode: str, **more: Any) -> Any:
    """As much of a `VllmConfig` as graphs are made by; `more` goes to the scheduler's."""
    module = importlib.import_module("vllm.config")
    compilation = getattr(module, "CompilationConfig", SimpleNamespace)(
        cudagraph_mode=module.CUDAGraphMode[mode],
        cudagraph_capture_sizes=list(sizes),
        max_cudagraph_capture_size=max(sizes),
    )
    return SimpleNamespace(
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(max_num_seqs=max(sizes), **more),
        parallel_config=SimpleNamespace(
            data_parallel_size=1,
            tensor_parallel_size=1,
            is_moe_model=False,
            use_sequence_parallel_moe=False,
            use_ubatching=False,
            enable_dbo=False,
            num_ubatches=1,
        ),
        lora_config=None,
        num_speculative_tokens=0,
        speculative_config=None,
        use_cumem_cudagraph_pool=False,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        model_config=None,
    )
