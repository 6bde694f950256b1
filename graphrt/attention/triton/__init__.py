"""Decode attention by Triton kernels; imported on first use, as Triton is an extra.

`TritonAttention` is what hosts use. The rest is for who measures the kernels by themselves.
"""

from graphrt.attention.triton.backend import SplitPolicy, TritonAttention
from graphrt.attention.triton.launch import Tiles, Workspace, decode, room_for, schedule
from graphrt.attention.triton.work import Room, Splits, fixed_splits, most_splits, scheduled_splits

__all__ = [
    "Room",
    "SplitPolicy",
    "Splits",
    "Tiles",
    "TritonAttention",
    "Workspace",
    "decode",
    "fixed_splits",
    "most_splits",
    "room_for",
    "schedule",
    "scheduled_splits",
]
