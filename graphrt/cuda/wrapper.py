"""The graph wrapper of NVIDIA GPUs."""

from __future__ import annotations

from graphrt.core.capture.wrapper import GraphWrapper


class CUDAGraphWrapper(GraphWrapper):
    """A `GraphWrapper` whose graphs are CUDA graphs."""

    platform_name = "cuda"
