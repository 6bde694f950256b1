"""ACL graphs on Ascend NPUs."""

from graphrt.ascend.budget.profiles import (
    Deployment,
    Profile,
    StreamFigures,
    update_aclgraph_sizes,
)
from graphrt.ascend.options import AscendOptions, UpdateOrder, UpdateStrategy
from graphrt.ascend.platform import ACLGraphWrapper, AscendPlatform
from graphrt.ascend.update.brackets import TaskHandle
from graphrt.ascend.update.deferred import UpdateWindow

__all__ = [
    "ACLGraphWrapper",
    "AscendOptions",
    "AscendPlatform",
    "Deployment",
    "Profile",
    "StreamFigures",
    "TaskHandle",
    "UpdateOrder",
    "UpdateStrategy",
    "UpdateWindow",
    "update_aclgraph_sizes",
]
