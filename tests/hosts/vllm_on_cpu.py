"""The published vLLM on a CPU: its own modules of graphs, over a platform that can be had anywhere.

To be imported before anything of vLLM. What vLLM asks CUDA for is answered by graphrt's CPU
platform, whose graphs are tapes; its kernels, and so its models and runners, are not there.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from graphrt import GraphPool
from graphrt.hosts.vllm import platform_type

MODULES = (
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.cudagraph_utils",
    "vllm.v1.worker.encoder_cudagraph",
)


def load() -> None:
    """Import what `install` looks at, with stand-ins for the platform and the capture stream."""
    import vllm.platforms as platforms
    from vllm.platforms.interface import Platform, PlatformEnum

    class AnyPlatform(Platform):
        _enum = PlatformEnum.UNSPECIFIED
        device_type = "cpu"

        @classmethod
        def get_static_graph_wrapper_cls(cls) -> str:
            return "vllm.compilation.cuda_graph.CUDAGraphWrapper"

        @classmethod
        def support_static_graph_mode(cls) -> bool:
            return True

        def graph_pool_handle(self) -> Any:
            return GraphPool("cpu").handle

    platforms._current_platform = platform_type(AnyPlatform)()
    parallel = importlib.import_module("vllm.distributed.parallel_state")

    @contextmanager
    def graph_capture(device: torch.device) -> Iterator[Any]:
        yield SimpleNamespace(stream=None)

    parallel.graph_capture = graph_capture
    for name in MODULES:
        importlib.import_module(name)


def config(sizes: list[int], mode: str, **more: Any) -> Any:
    """As much of a `VllmConfig` as graphs are made by; `more` goes to the scheduler's."""
    from vllm.config import CompilationConfig, CUDAGraphMode

    compilation = CompilationConfig(
        cudagraph_mode=CUDAGraphMode[mode],
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
