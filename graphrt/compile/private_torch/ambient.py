"""What of torch's state around a trace decides about the code that is compiled from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphrt.compile.private_torch.names import NAMES
from graphrt.core.base.errors import MissingTorchNameError

_ABSENT = "it is not in the key of compiled code"
_FLAGS = {
    name: NAMES.declare(f"torch._C.{path}", without=_ABSENT)
    for name, path in {
        "cudnn enabled": "_get_cudnn_enabled",
        "cudnn benchmark": "_get_cudnn_benchmark",
        "cudnn deterministic": "_get_cudnn_deterministic",
        "mkldnn enabled": "_get_mkldnn_enabled",
        "math attention": "_get_math_sdp_enabled",
        "flash attention": "_get_flash_sdp_enabled",
        "efficient attention": "_get_mem_efficient_sdp_enabled",
        "cudnn attention": "_get_cudnn_sdp_enabled",
        "fp16 reduction": "_get_cublas_allow_fp16_reduced_precision_reduction",
        "bf16 reduction": "_get_cublas_allow_bf16_reduced_precision_reduction",
        "fp16 accumulation": "_get_cublas_allow_fp16_accumulation",
    }.items()
}
_FILL = NAMES.declare("torch.utils.deterministic.fill_uninitialized_memory", without=_ABSENT)
_MODES = NAMES.declare("torch.overrides._get_current_function_mode_stack", without=_ABSENT)


def ambient_state(device_type: str) -> dict[str, object]:
    """Autocast, gradients, defaults, determinism and precision, as they are now; the number of
    threads for a CPU, whose code has it in it."""
    found: dict[str, object] = {
        f"autocast {kind}": str(torch.get_autocast_dtype(kind))
        if torch.is_autocast_enabled(kind)
        else "off"
        for kind in sorted({"cpu", device_type})
    }
    # A cast is kept for the next use of a tensor only where autocast is on.
    found["autocast cache"] = torch.is_autocast_cache_enabled()
    found["inference mode"] = torch.is_inference_mode_enabled()
    found["default dtype"] = str(torch.get_default_dtype())
    found["default device"] = str(torch.get_default_device())
    found["deterministic"] = torch.are_deterministic_algorithms_enabled()
    found["deterministic, warn only"] = torch.is_deterministic_algorithms_warn_only_enabled()
    found["matmul precision"] = torch.get_float32_matmul_precision()
    for name, flag in _FLAGS.items():
        found[name] = _told(flag.find)
    try:
        found["fill uninitialized memory"] = bool(_FILL.find())
        modes = _MODES.find()()
    except MissingTorchNameError:
        modes = []
    found["function modes"] = [type(each).__qualname__ for each in modes]
    if device_type == "cpu":
        found["threads"] = torch.get_num_threads()
    return found


def _told(find: Callable[[], Any]) -> object:
    try:
        return bool(find()())
    except MissingTorchNameError:
        return "not in this torch"
