"""Compiles the kernels that SGLang compiles while it starts, at once: engines then find them."""

import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial


def build() -> int:
    """Compile them; returns how many failed, after their tracebacks."""
    import torch
    from sglang.kernels.ops.activation import activation
    from sglang.kernels.ops.attention import rope
    from sglang.kernels.ops.kvcache import kvcache
    from sglang.kernels.ops.layernorm import norm

    from benchmarks.gpu.sglang_host.model import HEAD, KV_HEADS

    dtype = torch.bfloat16
    row_bytes = KV_HEADS * HEAD * dtype.itemsize
    kernels = {
        "fused rope": partial(rope._jit_fused_rope_module, True, HEAD, dtype, dtype),
        "fused add rmsnorm": partial(norm._jit_fused_add_rmsnorm_module, dtype, False),
        "activation": partial(activation.activation_module, dtype),
        "kv cache": partial(kvcache._jit_kvcache_module, row_bytes, row_bytes),
    }

    def one(name: str) -> bool:
        began = time.perf_counter()
        try:
            kernels[name]()
        except Exception:
            print(f"kernel {name}: not compiled\n{traceback.format_exc()}", flush=True)
            return False
        print(f"kernel {name}: {time.perf_counter() - began:.1f} s", flush=True)
        return True

    with ThreadPoolExecutor(len(kernels)) as threads:
        built = list(threads.map(one, kernels))
    return built.count(False)
