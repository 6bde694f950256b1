"""The platform `ascend-sim`: the Ascend platform, on the simulator."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from graphrt.ascend.driver.library import torch_npu
from graphrt.ascend.platform import AscendPlatform
from graphrt.ascend.simulator import loading
from graphrt.core.device.platform import Availability


class SimulatedAscendPlatform(AscendPlatform):
    """Everything is `torch_npu`'s own code down to the interface of CANN, which is simulated."""

    name = "ascend-sim"
    by_name_only = True

    def availability(self) -> Availability:
        reason = loading.why_not()
        return Availability(reason is None, reason or "")

    def start(self) -> None:
        """Put the simulator under `torch_npu`; raises `PlatformUnavailableError` if it cannot."""
        loading.start()

    @cached_property
    def _torch_npu(self) -> Any:
        loading.start()
        return torch_npu()

    @cached_property
    def _npu(self) -> Any:
        return self._torch_npu.npu

    def get_static_graph_wrapper_cls(self) -> str:
        return "graphrt.ascend.simulator.wrapper.SimulatedACLGraphWrapper"
