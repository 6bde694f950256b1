"""The scratch memory of attention operators: how much a call needs at most, asked at capture.

Without `workspace=` torch_npu allocates one on the stream that a task is updated on and frees it at
once, while the graph goes on writing to that address. So the operator's own function allocates it
during the capture, in the graph's pool, and every update passes it again.

Each function here takes the arguments of a call of its operator, and returns the keywords to add.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphrt.ascend.attention.mla import mla_options
from graphrt.ascend.driver.library import torch_npu

_LONGEST_AT = 6144
"""The number of keys at which vllm-ascend found the workspace of paged attention the largest."""


def of_fused(*args: Any, out: Any = None, **kwargs: Any) -> dict[str, torch.Tensor]:
    """Of `npu_fused_infer_attention_score`: the largest for any lengths, as the name asked says."""
    ask = torch_npu()._npu_fused_infer_attention_score_get_max_workspace
    return {"workspace": ask(*args, **kwargs)}


def of_fused_v2(*args: Any, out: Any = None, **kwargs: Any) -> dict[str, torch.Tensor]:
    """Of `npu_fused_infer_attention_score_v2`."""
    ask = torch_npu()._npu_fused_infer_attention_score_v2_get_max_workspace
    return {"workspace": ask(*args, **kwargs)}


def of_paged(
    *args: Any, context_lens: Sequence[int], out: torch.Tensor, **kwargs: Any
) -> dict[str, torch.Tensor]:
    """Of `_npu_paged_attention`: the largest for some candidate lengths.

    It splits keys among cores by their lengths, so the longest need not take the most memory.
    """
    ask = torch_npu()._npu_paged_attention_get_workspace
    if kwargs:
        # All by position, as lengths and output follow by position too.
        names = ("query", "key_cache", "value_cache", "num_kv_heads", "num_heads", "scale_value")
        args = (*args, *(kwargs[name] for name in (*names, "block_table")[len(args) :]))

    def asked(lengths: Sequence[int]) -> torch.Tensor:
        workspace: torch.Tensor = ask(
            *args, torch.tensor(lengths, dtype=torch.int32, device="cpu"), out
        )
        return workspace

    return {"workspace": _largest(asked, context_lens)}


def of_mla(
    *args: Any,
    context_lens: Sequence[int],
    output: torch.Tensor,
    lse: torch.Tensor | None = None,
    **kwargs: Any,
) -> dict[str, torch.Tensor]:
    """Of `npu_multi_head_latent_attention`."""
    ask = torch_npu().atb._npu_multi_head_latent_attention_get_workspace
    kwargs = mla_options(kwargs | {"lse": lse})
    del kwargs["lse"]
    tensors = ("q_nope", "q_rope", "ctkv", "k_rope", "block_tables")
    numbers = ("q_headnum", "qk_scale", "kv_headnum")
    args = (*args, *(kwargs.pop(name) for name in (*tensors, *numbers)[len(args) :]))

    def asked(lengths: Sequence[int]) -> torch.Tensor:
        workspace: torch.Tensor = ask(
            *args[:5], list(lengths), *args[5:], lse is not None, **kwargs
        )
        return workspace

    return {"workspace": _largest(asked, context_lens)}


def _largest(asked: Any, worst: Sequence[int]) -> torch.Tensor:
    longest = max(worst)
    powers = [1 << bit for bit in range(longest.bit_length())]
    candidates = {longest, min(longest, _LONGEST_AT), *powers}
    largest: torch.Tensor | None = None
    for keys in sorted(candidates, reverse=True):
        # Not `keys` for all: padding requests have length 0 even in the worst case.
        tensor = asked([min(keys, each) for each in worst])
        if largest is None or tensor.nbytes > largest.nbytes:
            largest = tensor
    assert largest is not None
    return largest
