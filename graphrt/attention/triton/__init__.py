"""Decode attention kernels in Triton; imported on first use, as Triton is an extra."""
