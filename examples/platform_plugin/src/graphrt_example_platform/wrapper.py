"""The wrapper class that hosts get from this platform."""

from __future__ import annotations

from graphrt.cpu import CPUGraphWrapper


class TracingGraphWrapper(CPUGraphWrapper):
    """A `CPUGraphWrapper` that makes its pools on `tracing_cpu`."""

    platform_name = "tracing_cpu"
