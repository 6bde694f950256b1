"""Attention operators of torch_npu as updatable tasks, and the updates that hosts build for them.

A task is called in the forward like its operator, with torch_npu's argument names, but for the
lengths, which come with `updates=`. `out=` is given by the caller; the workspace is asked for at
capture, for the worst case, and kept with the task (`workspace=` gives another one):

    attention = fused_infer_attention(max_kv_len=4096)
    attention(query, key, value, block_table=table, input_layout="TND", ..., out=[output, lse],
              task="layers.0")

An operator that is not here takes as few lines: see `attention_task`.
"""

from graphrt.ascend.attention.metadata import update_attn_params, update_mla_attn_params
from graphrt.ascend.attention.operators import (
    fused_infer_attention,
    fused_infer_attention_v2,
    mla_attention,
    paged_attention,
    room_in_blocks,
)
from graphrt.ascend.attention.task import AttentionTask, attention_task

__all__ = [
    "AttentionTask",
    "attention_task",
    "fused_infer_attention",
    "fused_infer_attention_v2",
    "mla_attention",
    "paged_attention",
    "room_in_blocks",
    "update_attn_params",
    "update_mla_attn_params",
]
