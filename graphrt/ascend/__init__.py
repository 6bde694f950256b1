"""ACL graphs on Ascend NPUs."""

from graphrt.ascend.options import AscendOptions, UpdateOrder, UpdateStrategy
from graphrt.ascend.platform import ACLGraphWrapper, AscendPlatform

__all__ = [
    "ACLGraphWrapper",
    "AscendOptions",
    "AscendPlatform",
    "UpdateOrder",
    "UpdateStrategy",
]
