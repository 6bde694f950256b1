"""How many streams of an NPU graphs hold, and how many sizes fit."""

from graphrt.ascend.budget.planned import PlannedStreams, planned_streams
from graphrt.ascend.budget.profiles import (
    DOMAINS,
    PROFILES,
    Deployment,
    Profile,
    StreamFigures,
    profile_named,
    update_aclgraph_sizes,
)
from graphrt.ascend.budget.streams import (
    DEVICES,
    SCARCE_STREAMS,
    STRUCTURAL,
    TORCH_NPU_STREAMS,
    Device,
    device_named,
    device_of,
    graph_streams,
    probe_streams,
    sizes_that_fit,
    stream_figures,
    stream_room,
    streams_needed,
    structural_figures,
)

__all__ = [
    "DEVICES",
    "DOMAINS",
    "PROFILES",
    "SCARCE_STREAMS",
    "STRUCTURAL",
    "TORCH_NPU_STREAMS",
    "Deployment",
    "Device",
    "PlannedStreams",
    "Profile",
    "StreamFigures",
    "device_named",
    "device_of",
    "graph_streams",
    "planned_streams",
    "probe_streams",
    "profile_named",
    "sizes_that_fit",
    "stream_figures",
    "stream_room",
    "streams_needed",
    "structural_figures",
    "update_aclgraph_sizes",
]
