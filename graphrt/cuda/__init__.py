"""CUDA graphs on NVIDIA GPUs."""

from graphrt.cuda.memory import GraphMemory
from graphrt.cuda.platform import CUDAGraphWrapper, CudaPlatform
from graphrt.cuda.sharing import ShareableGraph
from graphrt.cuda.update import TaskHandle

__all__ = [
    "CUDAGraphWrapper",
    "CudaPlatform",
    "GraphMemory",
    "ShareableGraph",
    "TaskHandle",
]
