"""ACL graphs on Ascend NPUs."""

from graphrt.ascend.memory import GraphMemory
from graphrt.ascend.options import AscendOptions, UpdateOrder, UpdateStrategy
from graphrt.ascend.platform import ACLGraphWrapper, AscendPlatform
from graphrt.ascend.update import TaskHandle

__all__ = [
    "ACLGraphWrapper",
    "AscendOptions",
    "AscendPlatform",
    "GraphMemory",
    "TaskHandle",
    "UpdateOrder",
    "UpdateStrategy",
]
