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
    "mem_fraction_static": 0.4,
    "cuda_graph_max_bs_decode": 64,
    "random_seed": 0,
    "log_level": "info",
}

_FULL = {"cuda_graph_backend_decode": "full", "disable_prefill_cuda_graph": True}
_BREAKABLE = {
    "cuda_graph_backend_decode": "full",
    "cuda_graph_backend_prefill": "breakable",
    "cuda_graph_bs_prefill": PREFILL_SIZES,
}
_FREE = {**_BREAKABLE, "enable_deterministic_inference": True, "chunked_prefill_size": 256}
_CACHED = {**_FREE, "disable_radix_cache": False}
_NGRAM = {**_FULL, "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
_ON = {"GRAPHRT_SGLANG": "1"}
# With a radix cache SGLang never begins a longer prompt whose chunk is under this: 4096 by default.
_ALIGNED = {"SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE": "256"}
_CHECKED = {**_ON, "GRAPHRT_CHECK": "first"}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "eager": {"disable_decode_cuda_graph": True, "disable_prefill_cuda_graph": True},
    "full": _FULL,
    "full-graphrt": _FULL,
    "breakable": _BREAKABLE,
    "breakable-graphrt": _BREAKABLE,
    "free": _FREE,
    "free-graphrt": _FREE,
    "cached": _CACHED,
    "cached-graphrt": _CACHED,
    "ngram": _NGRAM,
    "ngram-again": _NGRAM,
    "ngram-graphrt": _NGRAM,
    "checked": _FULL,
    "defect-slot": _FULL,
    "defect-number": _FULL,
}

VARIABLES: dict[str, dict[str, str]] = {
    "full-graphrt": _ON,
    "breakable-graphrt": _ON,
    "free-graphrt": _ON,
    "cached": _ALIGNED,
    "cached-graphrt": _ON | _ALIGNED,
    "ngram-graphrt": _ON,
    "checked": _CHECKED,
    "defect-slot": {**_CHECKED, "GRAPHRT_BENCH_DEFECT": "slot"},
    "defect-number": {**_CHECKED, "GRAPHRT_BENCH_DEFECT": "number"},
}

AGAINST = {
    "full": "eager",
    "full-graphrt": "full",
    "breakable": "eager",
    "breakable-graphrt": "breakable",
    "free-graphrt": "free",
    "cached": "free",
    "cached-graphrt": "cached",
    "ngram-again": "ngram",
    "ngram-graphrt": "ngram",
    "checked": "full",
    "defect-slot": "full",
    "defect-number": "full",
}
"""Which other engine each is compared with."""


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
