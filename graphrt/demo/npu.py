"""Decode attention of the demo on NPUs: torch_npu's fused operator, in the graph as a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphrt.demo.layer import DecoderConfig


class FusedDecodeAttention:
    """`npu_fused_infer_attention_score` for batches of one token a request.

    Its lengths are arguments on the host, so a captured call would keep those of its capture: each
    layer is a task, and every step brings the lengths as `updates`.
    """

    def __init__(self, config: DecoderConfig, context: int) -> None:
        from graphrt.ascend.attention import fused_infer_attention

        self.config = config
        # The operator takes more head sizes in this layout than in TND.
        self.task = fused_infer_attention("attention", max_kv_len=context, layout="BSND")

    def __call__(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, block_table: Tensor
    ) -> Tensor:
        """[tokens, heads * head_dim]; `keys` and `values` are [pages, page_size, kv_heads,
        head_dim] and hold this step's already, `block_table` is [reqs, max_blocks]."""
        config, (pages, page_size) = self.config, keys.shape[:2]
        query = query.unsqueeze(1)
        output = torch.empty_like(query)
        self.task(
            query,
            keys.view(pages, page_size, -1),
            values.view(pages, page_size, -1),
            block_table=block_table.to(torch.int32),
            input_layout="BSND",
            block_size=page_size,
            num_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            scale=config.head_dim**-0.5,
            out=[output, torch.empty(1, dtype=torch.float32, device=query.device)],
            task=f"layers.{layer}",
        )
        return output.flatten(1)

    def updates(self, context_lens: Sequence[int]) -> dict[str, Any]:
        """The host arguments of a step, from the tokens that each request has in the cache, those
        of this step included."""
        return {"attention": {"actual_seq_lengths_kv": list(context_lens)}}
