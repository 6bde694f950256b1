"""CUDA graphs on NVIDIA GPUs."""

from graphrt.cuda.platform import CudaPlatform
from graphrt.cuda.wrapper import CUDAGraphWrapper

__all__ = ["CUDAGraphWrapper", "CudaPlatform"]
