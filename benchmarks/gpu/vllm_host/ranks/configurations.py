"""The engines of two GPUs: configurations by name, their arguments and environment."""

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.gpu.vllm_host.configurations import PIECES
from benchmarks.gpu.vllm_host.processes import entry_points

CONTESTANTS = ("graphrt", "vllm")
VOCABULARY = 128256
LAYERS = 16
SIZES = [1, 2, 4, 8, 16, 40, 64, 128, 256]

MULTICAST_OFF = {
    # A program that uses NVLink's multicast can put shared GPUs out of service.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}


def compared() -> dict[str, dict[str, Any]]:
    """Tensor parallel 2: name -> options."""
    found = {}
    for mode in ("FULL_AND_PIECEWISE", "PIECEWISE"):
        for runner in ("v2", "v1"):
            for reduce in ("custom", "nccl"):
                found[f"{runner}-{mode.lower()}-{reduce}"] = {
                    "runner": runner,
                    "reduce": reduce,
                    "compilation": {**PIECES, "cudagraph_mode": mode},
                }
    found["v2-breakable-custom"] = {
        "runner": "v2",
        "reduce": "custom",
        "timed": False,
        "compilation": {"cudagraph_mode": "FULL_AND_PIECEWISE"},
        "env": {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"},
    }
    return found


KILLED = {
    "replay-custom": {"point": "replay", "reduce": "custom"},
    "replay-nccl": {"point": "replay", "reduce": "nccl"},
    "exchange-custom": {"point": "exchange", "reduce": "custom"},
    "capture-nccl": {"point": "capture", "reduce": "nccl"},
    "between-custom": {"point": "between", "reduce": "custom"},
}


def killed() -> dict[str, dict[str, Any]]:
    """Engines, as a user starts them, whose rank 1 is killed: name -> options."""
    return {
        f"killed-{name}": {
            "runner": "v2",
            **options,
            "multiprocessing": "1",
            "compilation": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
            "sizes": [1, 2, 4, 8],
        }
        for name, options in KILLED.items()
    }


def data_parallel() -> dict[str, dict[str, Any]]:
    """Data parallel 2 of a small mixture of experts."""
    return {
        f"{runner}-moe-dp": {
            "runner": runner,
            "dp": True,
            "reduce": "nccl",
            # In one process an idle rank may wait for one that only takes its last results.
            "multiprocessing": "1",
            "compilation": {**PIECES, "cudagraph_mode": "FULL_AND_PIECEWISE"},
        }
        for runner in ("v2", "v1")
    }


def engine_options(options: dict[str, Any], work: Path) -> dict[str, Any]:
    """What the process of an engine is given: arguments of `LLM`."""
    is_dp = options.get("dp", False)
    arguments: dict[str, Any] = {
        "model": str(work / ("mixtral" if is_dp else "llama-1b")),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "gpu_memory_utilization": 0.03,
        "kv_cache_memory_bytes": 512 << 20,
        "enable_prefix_caching": False,
        "seed": 0,
        "worker_extension_cls": "benchmarks.gpu.vllm_host.ranks.worker.Extension",
        "compilation_config": {
            **options["compilation"],
            "cudagraph_capture_sizes": options.get("sizes", SIZES),
        },
    }
    if is_dp:
        arguments |= {"enable_expert_parallel": True}
    else:
        arguments |= {
            "tensor_parallel_size": 2,
            "distributed_executor_backend": "mp",
            "disable_custom_all_reduce": options["reduce"] == "nccl",
        }
    return {"vocabulary": 32000 if is_dp else VOCABULARY, "arguments": arguments}


def environment(
    options: dict[str, Any], contestant: str, work: Path, path: str, name: str
) -> dict[str, str]:
    return {
        **os.environ,
        **MULTICAST_OFF,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "GRAPHRT_VLLM": str(int(contestant == "graphrt")),
        "VLLM_ENABLE_V1_MULTIPROCESSING": options.get("multiprocessing", "0"),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_USE_V2_MODEL_RUNNER": {"v1": "0", "v2": "1"}[options["runner"]],
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_DISABLE_COMPILE_CACHE": "1",
        "VLLM_CACHE_ROOT": str(work / "cache" / name),
        **options.get("env", {}),
    }


def prepare(work: Path) -> None:
    """The models' files, and graphrt's entry points."""
    work.mkdir(parents=True, exist_ok=True)
    entry_points(work / "installed")
    common: dict[str, Any] = {
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    llama = common | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
    }
    mixtral = common | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 2048,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    }
    for name, config in (("llama-1b", llama), ("mixtral", mixtral)):
        (work / name).mkdir(exist_ok=True)
        (work / name / "config.json").write_text(json.dumps(config))
