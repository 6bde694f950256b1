"""The graph wrapper of the CPU platform."""

from __future__ import annotations

from graphrt.core.capture.wrapper import GraphWrapper


class CPUGraphWrapper(GraphWrapper):
    """A `GraphWrapper` whose graphs are tapes of operators."""

    platform_name = "cpu"
