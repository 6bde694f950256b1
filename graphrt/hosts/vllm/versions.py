"""The versions of vLLM that are known, and the names of each that graphrt reads or replaces."""

from __future__ import annotations

import sys

from graphrt.hosts.names import missing_arguments, missing_names, missing_uses, refuse

KNOWN = ("0.24", "0.33")
"""Whose source was read, and whose own tests were run with graphrt."""
CAPTURING_WHILE_SERVING = ("0.24",)
"""Those of which captures may go on beside steps."""

V1 = "vllm.v1.worker.gpu_model_runner"
V2 = "vllm.v1.worker.gpu.cudagraph_utils"
RUNNER2 = "vllm.v1.worker.gpu.model_runner"
PROFILE = "profile_cudagraph_memory"
ENCODER = "vllm.v1.worker.encoder_cudagraph"
BREAKABLE = "vllm.compilation.breakable_cudagraph"
WORKER = "vllm.v1.worker.gpu_worker"
WRAPPER = "vllm.compilation.cuda_graph"
PARALLEL = "vllm.distributed.parallel_state"
EXECUTOR = "vllm.v1.executor.multiproc_executor"

_OF_RUNNERS = (PROFILE, "capture_model", "reload_weights", "get_model")

_NAMES = {
    WRAPPER: ("CUDAGraphWrapper._all_instances", "CUDAGraphWrapper.unwrap"),
    BREAKABLE: (
        "BreakableCUDAGraphCapture._tls",
        "BreakableCUDAGraphCapture.current",
        "BreakableCUDAGraphWrapper._all_instances",
        "eager_break_during_capture",
    ),
    "vllm.compilation.counter": ("compilation_counter.num_cudagraph_captured",),
    "vllm.distributed.device_communicators.pynccl_allocator": ("set_graph_pool_id",),
    "vllm.envs": ("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS",),
    "vllm.forward_context": ("_forward_context", "set_forward_context"),
    "vllm.model_executor.offloader.base": ("NoopOffloader", "get_offloader"),
    PARALLEL: ("graph_capture",),
    "vllm.platforms": ("current_platform.get_global_graph_pool",),
    ENCODER: ("EncoderCudaGraphManager._get_graph_set", "torch.cuda.CUDAGraph"),
    V2: ("CudaGraphManager.capture", "CudaGraphManager.dispatch", "torch.cuda.CUDAGraph"),
    RUNNER2: tuple(f"GPUModelRunner.{each}" for each in _OF_RUNNERS),
    V1: (
        "CUDAGraphWrapper",
        "graph_capture",
        *[f"GPUModelRunner.{each}" for each in _OF_RUNNERS],
    ),
    WORKER: ("Worker.finish_weight_update",),
}

_WHILE_SERVING = {
    V1: ("GPUModelRunner._warmup_and_capture", "GPUModelRunner.execute_model"),
    V2: ("graph_capture", "is_global_first_rank"),
    RUNNER2: ("GPUModelRunner.execute_model",),
    WORKER: ("Worker.compile_or_warm_up_model",),
    "vllm.compilation.monitor": ("cudagraph_capturing_enabled",),
    "vllm.lora.model_manager": ("LoRAModelManager._set_adapter_mapping",),
    "vllm.lora.worker_manager": tuple(
        f"LRUCacheWorkerLoRAManager.{each}" for each in ("add_dummy_lora", "set_active_adapters")
    ),
    "vllm.envs": ("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS",),
}
"""Names that captures beside steps need too."""

_ARGUMENTS = {
    (WRAPPER, "CUDAGraphWrapper.__init__"): (
        "runnable",
        "vllm_config",
        "runtime_mode",
        "cudagraph_options",
    ),
    (BREAKABLE, "BreakableCUDAGraphWrapper.__init__"): ("runnable", "vllm_config"),
    (PARALLEL, "graph_capture"): ("device",),
    (V2, "CudaGraphManager.capture"): ("create_forward_fn",),
    (V2, "CudaGraphManager.dispatch"): ("num_reqs", "num_tokens"),
    (V2, "CudaGraphManager.run_fullgraph"): ("desc",),
    (RUNNER2, "GPUModelRunner.execute_model"): ("dummy_run",),
    (ENCODER, "EncoderCudaGraphManager._capture_budget_graph"): ("token_budget", "path"),
}
"""Functions of vLLM that graphrt replaces or calls, with the arguments that they must take."""

_OF_WORKERS = {(EXECUTOR, "WorkerProc.monitor_death_pipe"): ("death_pipe",)}
"""The same, of a module that only engines with several workers import."""

_USES = {
    (V2, "CudaGraphManager.capture"): {"CUDAGraph", "graph", "graphs"},
    (V2, "CudaGraphManager.dispatch"): {"_graphs_captured"},
    (ENCODER, "EncoderCudaGraphManager._capture_budget_graph"): {"CUDAGraph", "graph"},
    (RUNNER2, "GPUModelRunner.execute_model"): {"ExecuteModelState", "run_fullgraph"},
    (BREAKABLE, "eager_break_during_capture"): {"add_eager", "fn", "weak_args", "weak_kwargs"},
}
"""Names that the code of a function must use: graphrt replaces the objects of these names."""


def check_version(version: str) -> None:
    """Raise `UnsupportedHostError` for a vLLM that graphrt does not know."""
    refuse("vLLM", version, KNOWN, "GRAPHRT_VLLM")


def check_names(version: str, *, while_serving: bool) -> None:
    """Raise `UnsupportedHostError` where vLLM lacks a name, an argument or a call that graphrt
    relies on, which names all of them."""
    arguments = _ARGUMENTS | (_OF_WORKERS if EXECUTOR in sys.modules else {})
    missing = [*missing_names(_NAMES), *missing_arguments(arguments), *missing_uses(_USES)]
    if while_serving:
        missing += missing_names(_WHILE_SERVING)
    refuse("vLLM", version, KNOWN, "GRAPHRT_VLLM", missing)
