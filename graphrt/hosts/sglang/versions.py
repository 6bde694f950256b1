"""The versions of SGLang that are known, and the names of each that graphrt reads or replaces."""

from __future__ import annotations

from types import CodeType
from typing import Any

from graphrt.hosts.names import MISSING, find, missing_names, missing_uses, refuse

SWITCH = "GRAPHRT_SGLANG"
KNOWN = ("0.5.17",)
"""Whose source was read, and whose engine was run with graphrt."""

_RUNNER = "sglang.srt.model_executor."
FULL = _RUNNER + "runner_backend.full_cuda_graph_backend"
BREAKABLE = _RUNNER + "runner_backend.breakable_cuda_graph_backend"
BREAKS = _RUNNER + "runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"
CONTEXT = _RUNNER + "forward_context"
MODEL_RUNNER = _RUNNER + "model_runner"
DECODE = _RUNNER + "runner.decode_cuda_graph_runner"

OF_BACKENDS = ("capture_session", "capture_one", "replay", "cleanup")
_CALLS = (
    "__init__(cuda_graph_runner, enable_memory_saver)",
    "can_run",
    "capture_session",
    "capture_one(shape_key, forward_fn, capture_inputs, post_warmup_hook)",
    "replay(shape_key, static_forward_batch)",
    "cleanup",
)
_NAMES = {
    FULL: tuple(f"FullCudaGraphBackend.{each}" for each in _CALLS),
    BREAKABLE: tuple(
        f"BreakableCudaGraphBackend.{each}" for each in (*_CALLS, "__init__(debug_eager)")
    ),
    BREAKS: ("_current_capture_var", "eager_on_graph(enable, capture_stub)"),
    CONTEXT: ("forward_context", "get_forward_context", "has_forward_context"),
    MODEL_RUNNER: ("ModelRunner.forward",),
    DECODE: tuple(
        f"DecodeCudaGraphRunner.{each}"
        for each in ("can_run_graph", "_pad_to_bucket", "_capture_graph_size(bs, num_tokens)")
    ),
}
_USED = {"_device_module", "_tp_group", "_graphs", "_pool"}
_USES = {
    (FULL, "FullCudaGraphBackend.capture_one"): _USED,
    (BREAKABLE, "BreakableCudaGraphBackend.capture_one"): _USED | {"_debug_eager"},
    (DECODE, "DecodeCudaGraphRunner.load_batch"): {"capture_bs", "captured_req_width"},
}
"""Names that the code of a function must use: graphrt reads what it has left there."""

CELLS = ("capture_stub", "inner")
"""What a function that SGLang marked as a break closes over."""


def marked_code(eager_on_graph: Any) -> CodeType | None:
    """The code that all functions share which `eager_on_graph` has marked; None if it is not as
    graphrt knows it, or a mark is no function."""
    try:
        code = eager_on_graph(True)(marked_code).__code__
    except (AttributeError, TypeError):
        return None
    return code if code.co_freevars == CELLS else None


def check(version: str) -> None:
    """Raise `UnsupportedHostError` for an SGLang that graphrt does not know, or that lacks names,
    which names all of them."""
    refuse("SGLang", version, KNOWN, SWITCH)
    missing = [*missing_names(_NAMES), *missing_uses(_USES)]
    mark = find(BREAKS, "eager_on_graph")
    if mark is not MISSING and marked_code(mark) is None:
        missing.append(
            f"function of {BREAKS}.eager_on_graph(True) that closes over {', '.join(CELLS)}"
        )
    refuse("SGLang", version, KNOWN, SWITCH, missing)
