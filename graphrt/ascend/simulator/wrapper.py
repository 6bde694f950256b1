"""The graph wrapper of the simulator."""

from __future__ import annotations

from graphrt.core.capture.wrapper import GraphWrapper


class SimulatedACLGraphWrapper(GraphWrapper):
    """A `GraphWrapper` whose graphs are ACL graphs of a simulated device."""

    platform_name = "ascend-sim"
