"""CUDA graphs on NVIDIA GPUs."""

from graphrt.cuda.platform import CUDAGraphWrapper, CudaPlatform

__all__ = [
    "CUDAGraphWrapper",
    "CudaPlatform",
]
