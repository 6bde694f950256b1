"""ACL graphs on Ascend NPUs."""

from graphrt.ascend.options import AscendOptions, UpdateOrder, UpdateStrategy
from graphrt.ascend.platform import ACLGraphWrapper, AscendPlatform
from graphrt.ascend.update import TaskHandle, UpdateWindow

__all__ = [
    "ACLGraphWrapper",
    "AscendOptions",
    "AscendPlatform",
    "TaskHandle",
    "UpdateOrder",
    "UpdateStrategy",
    "UpdateWindow",
]
