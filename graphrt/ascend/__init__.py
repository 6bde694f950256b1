"""ACL graphs on Ascend NPUs."""

from graphrt.ascend.options import AscendOptions
from graphrt.ascend.platform import AscendPlatform
from graphrt.ascend.wrapper import ACLGraphWrapper

__all__ = ["ACLGraphWrapper", "AscendOptions", "AscendPlatform"]
