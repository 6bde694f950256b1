"""The graph wrapper of devices without a platform of their own."""

from __future__ import annotations

from graphrt.core.capture.wrapper import GraphWrapper


class AcceleratorGraphWrapper(GraphWrapper):
    """A `GraphWrapper` whose graphs are those of `torch.accelerator`."""

    platform_name = "accelerator"
