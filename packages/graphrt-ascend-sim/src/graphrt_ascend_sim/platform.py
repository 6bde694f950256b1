"""The platform `ascend-sim`: the Ascend platform, on the simulator."""

from __future__ import annotations

from graphrt.ascend import ACLGraphWrapper, AscendPlatform
from graphrt.platforms import Availability
from graphrt_ascend_sim import loading


class SimulatedAscendPlatform(AscendPlatform):
    """Everything is `torch_npu`'s own code down to the interface of CANN, which is simulated."""

    name = "ascend-sim"
    simulated = True
    by_name_only = True

    def availability(self) -> Availability:
        reason = loading.why_not()
        return Availability(reason is None, reason or "")

    def start(self) -> None:
        """Put the simulator under `torch_npu`; raises `PlatformError` if it cannot."""
        loading.start()

    def get_static_graph_wrapper_cls(self) -> str:
        return "graphrt_ascend_sim.SimulatedACLGraphWrapper"


class SimulatedACLGraphWrapper(ACLGraphWrapper):
    """An `ACLGraphWrapper` of a simulated device."""

    platform_name = "ascend-sim"
