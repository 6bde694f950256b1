"""Decode attention by Triton kernels; imported on first use, as Triton is an extra.

`TritonAttention` is what hosts use. The rest is for benchmarks of the kernels.
"""
