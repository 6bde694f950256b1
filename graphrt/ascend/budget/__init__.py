"""How many streams of an NPU graphs hold, and how many sizes fit."""

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
    STRUCTURAL,
    Device,
    device_named,
    device_of,
    graph_streams,
    probe_streams,
    sizes_that_fit,
    stream_figures,
    structural_figures,
)

__all__ = [
    "DEVICES",
    "DOMAINS",
    "PROFILES",
    "STRUCTURAL",
    "Deployment",
    "Device",
    "Profile",
    "StreamFigures",
    "device_named",
    "device_of",
    "graph_streams",
    "probe_streams",
    "profile_named",
    "sizes_that_fit",
    "stream_figures",
    "structural_figures",
    "update_aclgraph_sizes",
]
