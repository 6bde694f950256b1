"""Any device that registers graphs with torch (`torch.accelerator.Graph`)."""

from graphrt.accelerator.platform import AcceleratorPlatform
from graphrt.accelerator.wrapper import AcceleratorGraphWrapper

__all__ = ["AcceleratorGraphWrapper", "AcceleratorPlatform"]
