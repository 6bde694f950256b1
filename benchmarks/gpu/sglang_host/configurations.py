"""What each engine is started with."""

from typing import Any

BATCHES = (1, 3, 8, 37, 64)
NEW_TOKENS = 24
PREFILL_SIZES = [16, 64, 256, 1024]

_COMMON: dict[str, Any] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "skip_tokenizer_init": True,
    "disable_radix_cache": True,
    "context_length": 2048,
    "chunked_prefill_size": 1024,
    "max_running_requests": 64,
    "max_total_tokens": 65536,
    "mem_fraction_static": 0.5,
    "cuda_graph_max_bs_decode": 64,
    "random_seed": 0,
    "log_level": "info",
}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "eager": {"disable_decode_cuda_graph": True, "disable_prefill_cuda_graph": True},
    "full": {"cuda_graph_backend_decode": "full", "disable_prefill_cuda_graph": True},
    "full-breakable": {
        "cuda_graph_backend_decode": "full",
        "cuda_graph_backend_prefill": "breakable",
        "cuda_graph_bs_prefill": PREFILL_SIZES,
    },
    "deterministic": {
        "cuda_graph_backend_decode": "full",
        "cuda_graph_backend_prefill": "breakable",
        "cuda_graph_bs_prefill": PREFILL_SIZES,
        "enable_deterministic_inference": True,
    },
    "ngram": {
        "cuda_graph_backend_decode": "full",
        "disable_prefill_cuda_graph": True,
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": 4,
    },
}


def engine_arguments(name: str, model: str) -> dict[str, Any]:
    """The arguments of `sglang.Engine`; ports differ between engines that start at once."""
    port = 31000 + 100 * list(CONFIGURATIONS).index(name)
    return {
        **_COMMON,
        **CONFIGURATIONS[name],
        "model_path": model,
        "port": port,
        "nccl_port": port + 50,
    }
