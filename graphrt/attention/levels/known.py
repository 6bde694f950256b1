"""The attention backends of engines and the levels they declare, as data."""

from __future__ import annotations

from graphrt.attention.levels.facts import Condition, KnownBackend, Level
from graphrt.core.batch.modes import AttentionSupport

_ALWAYS = AttentionSupport.ALWAYS
_UNIFORM = AttentionSupport.UNIFORM_BATCH
_SINGLE = AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE
_NEVER = AttentionSupport.NEVER

_VLLM = "vLLM 0.33"
_SGLANG = "SGLang 0.5.23"
_VLLM_ASCEND = "vllm-ascend 0.23"

_DEVICE_LENGTHS = "lengths are device tensors at fixed addresses, for any mix of queries"
_SPEC_AS_DECODE = "its decode kernel takes short queries of one common length"
_ONE_TOKEN = "its decode kernel takes one token a request"
_STATE = "decode updates states in place, for queries of one common length"
_ROUTED = "a graph replays one of two children, and only plain decode always picks the same"


def _one(
    name: str,
    support: AttentionSupport,
    why: str,
    *aliases: str,
    source: str = _VLLM,
    conservative: bool = False,
    task_update: bool = False,
) -> KnownBackend:
    level = Level(support, why, conservative=conservative)
    return KnownBackend(name, (level,), source, aliases, task_update)


_FLASH = (
    _one(
        "flash-attention-2",
        _UNIFORM,
        "a graph captured at one token a request packs heads in a way that is wrong for mixed "
        "batches; with longer queries it would serve them",
        "fa2",
        "flash-attn-2",
        conservative=True,
    ),
    _one("flash-attention-3", _ALWAYS, "one routine for all batches", "fa3", "flash-attn-3"),
    _one("flash-attention-4", _ALWAYS, "one routine for all batches", "fa4", "flash-attn-4"),
    _one("flash-attn-mla", _UNIFORM, _SPEC_AS_DECODE),
    _one("flash-attn-mla-sparse", _UNIFORM, _SPEC_AS_DECODE, "flash-attn-mla-sparse-fa4"),
)

_FLASHINFER = (
    KnownBackend(
        "flashinfer",
        (
            Level(
                _SINGLE,
                "XQA returns no softmax sums to merge ranks by, and TRT-LLM kernels cannot be "
                "captured for longer queries there",
                (Condition("decode_context_parallel", 2),),
            ),
            Level(
                _UNIFORM,
                "FA2 decodes causal queries of one common length",
                (Condition("fa2_kernels"), Condition("causal")),
            ),
            Level(
                _SINGLE,
                "FA2 decodes longer queries only if they are causal",
                (Condition("fa2_kernels"), Condition("causal", False)),
            ),
            Level(_UNIFORM, "XQA takes queries of one common length", (Condition("xqa_kernels"),)),
            Level(
                _UNIFORM,
                "TRT-LLM kernels take causal queries of one common length",
                (Condition("trtllm_kernels"), Condition("causal")),
            ),
            Level(_SINGLE, "the plan of its own decode kernel is for one token a request"),
        ),
        _VLLM,
    ),
    _one("flashinfer-mla", _ALWAYS, "kernels find ragged queries by device offsets"),
    _one(
        "flashinfer-mla-sparse",
        _UNIFORM,
        _SPEC_AS_DECODE,
        "flashinfer-mla-sparse-sm90",
        "flashinfer-mla-sparse-sm120",
    ),
    _one("trtllm-mha", _UNIFORM, "decode and verification are captured", source=_SGLANG),
    _one("trtllm-mla", _UNIFORM, "decode and verification are captured", source=_SGLANG),
)

_NVIDIA = (
    _one("flashmla", _UNIFORM, _SPEC_AS_DECODE),
    _one("flashmla-sparse", _UNIFORM, _SPEC_AS_DECODE),
    _one("flashmla-sparse-dsv4", _ALWAYS, _DEVICE_LENGTHS),
    _one("flashinfer-sparse-dsv4", _ALWAYS, _DEVICE_LENGTHS, "flashinfer-mla-sparse-dsv4"),
    _one("cutlass-mla", _SINGLE, _ONE_TOKEN),
    _one("tokenspeed-mla", _UNIFORM, _SPEC_AS_DECODE),
    _one("b12x", _UNIFORM, "plans of decode and verification are made per graph"),
    KnownBackend(
        "hpc-attn",
        (
            Level(_UNIFORM, "verification is captured", (Condition("speculative"),)),
            Level(_SINGLE, _ONE_TOKEN),
        ),
        _VLLM,
    ),
)

_OWN = (
    _one("graphrt-triton", _UNIFORM, _SPEC_AS_DECODE, source="graphrt"),
    _one("graphrt-sdpa", _ALWAYS, _DEVICE_LENGTHS, source="graphrt"),
)

_PORTABLE = (
    _one("triton-attention", _ALWAYS, _DEVICE_LENGTHS, "triton", "triton-attn", "triton-grouped"),
    _one("triton-mla", _UNIFORM, _SPEC_AS_DECODE),
    KnownBackend(
        "triton-flash-attn",
        (
            Level(_NEVER, _ROUTED, (Condition("unclamped_window"),)),
            Level(_SINGLE, _ROUTED),
        ),
        _VLLM,
        ("triton-flashinfer",),
    ),
    _one(
        "turboquant",
        _SINGLE,
        "vLLM declares UNIFORM_BATCH, but longer queries go to prefill, which reads host lengths",
        "ultraquant",
        conservative=True,
    ),
    _one(
        "flex-attention",
        _ALWAYS,
        "block masks are built in buffers that stay; SGLang makes new ones, so it captures nothing",
        "flex",
        "torch-flex",
    ),
    KnownBackend(
        "torch-sdpa",
        (
            Level(
                _SINGLE,
                "the mask is an input; one-token decode is what gpt-fast replays",
                (Condition("static_cache"),),
                conservative=True,
            ),
            Level(_NEVER, "each request is sliced by its length in Python"),
        ),
        _SGLANG,
        ("sdpa", "torch-native"),
    ),
    _one("chunked-local", _NEVER, "lengths are copied to the host each step, to cut chunks"),
)

_SPARSE = (
    KnownBackend(
        "dsa-indexer",
        (
            Level(
                _ALWAYS, "any mix of query lengths is one launch", (Condition("varlen_kernels"),)
            ),
            Level(_ALWAYS, "every row is one token", (Condition("flattened_queries"),)),
            Level(_UNIFORM, "its kernel takes queries of one common length"),
        ),
        _VLLM,
        ("sparse-indexer", "deepseek-v32-indexer"),
    ),
    _one("dsa", _UNIFORM, "decode and verification are captured", "nsa", source=_SGLANG),
    _one("sparse-swa", _UNIFORM, _SPEC_AS_DECODE, "deepseek-sparse-swa"),
    _one("minimax-m3-sparse", _UNIFORM, _SPEC_AS_DECODE),
)

_STATEFUL = (
    _one("mamba", _UNIFORM, _STATE, "mamba1", "mamba1-attn"),
    _one("mamba2", _UNIFORM, _STATE, "mamba2-attn"),
    _one("gdn", _UNIFORM, _STATE, "gdn-attn", "gated-delta-net"),
    _one("kda", _ALWAYS, "states are found by device offsets, for any mix of queries"),
    _one("short-conv", _UNIFORM, _STATE, "short-conv-attn"),
    _one("linear-attention", _SINGLE, _ONE_TOKEN, "linear", "linear-attn"),
    _one("bailing-linear", _UNIFORM, _STATE, "bailing-linear-attn"),
)

_ROCM = (
    _one("rocm-attention", _ALWAYS, _DEVICE_LENGTHS, "rocm-attn", "rocm-segmented-attn"),
    _one("aiter-unified", _ALWAYS, _DEVICE_LENGTHS, "rocm-aiter-unified-attn"),
    _one("aiter", _UNIFORM, _SPEC_AS_DECODE, "rocm-aiter-fa", "aiter-flash-attention"),
    _one("aiter-mla", _UNIFORM, _SPEC_AS_DECODE, "rocm-aiter-mla", "rocm-aiter-triton-mla"),
    _one("aiter-mla-sparse", _UNIFORM, _SPEC_AS_DECODE, "rocm-aiter-mla-sparse"),
    _one("rocm-octave", _UNIFORM, "short queries of any step go to its decode kernel"),
)

_XPU = (
    _one("xpu-flash-attention", _ALWAYS, "one routine for all batches", "xpu"),
    _one("xpu-flash-attn-mla", _SINGLE, _ONE_TOKEN),
    _one("xpu-mla-sparse", _NEVER, "not checked in graphs", conservative=True),
)

_CPU = (
    _one("intel-amx", _SINGLE, "only one-token decode is captured", source=_SGLANG),
    _one("cpu-attn", _NEVER, "vLLM captures nothing on CPUs", "cpu-mla", "amx-mla"),
)

_ASCEND = (
    _one(
        "ascend-fia",
        _ALWAYS,
        "fused infer attention takes lengths as host lists, for any mix of queries",
        "ascend",
        "ascend-attention",
        "ascend-fused-infer-attention",
        "npu-fused-infer-attention-score",
        source=_VLLM_ASCEND,
        task_update=True,
    ),
    _one(
        "ascend-paged",
        _SINGLE,
        "vllm-ascend calls it for decode without drafts only; its workspace follows the lengths",
        "ascend-paged-attention",
        "npu-paged-attention",
        source=_VLLM_ASCEND,
        conservative=True,
        task_update=True,
    ),
    _one("ascend-mla", _UNIFORM, _SPEC_AS_DECODE, source=_VLLM_ASCEND, task_update=True),
    _one("ascend-sfa", _UNIFORM, "lengths are device tensors", source=_VLLM_ASCEND),
    _one("ascend-dsa", _UNIFORM, "lengths are device tensors", source=_VLLM_ASCEND),
    _one("ascend-gdn", _UNIFORM, _STATE, source=_VLLM_ASCEND),
)

FAMILIES = {
    "graphrt": _OWN,
    "FlashAttention": _FLASH,
    "FlashInfer": _FLASHINFER,
    "NVIDIA": _NVIDIA,
    "Triton, PyTorch": _PORTABLE,
    "Sparse": _SPARSE,
    "States": _STATEFUL,
    "ROCm": _ROCM,
    "XPU": _XPU,
    "CPU": _CPU,
    "Ascend": _ASCEND,
}
