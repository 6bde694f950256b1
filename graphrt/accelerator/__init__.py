"""Any device that registers graphs with torch (`torch.accelerator.Graph`)."""

from graphrt.accelerator.platform import AcceleratorGraphWrapper, AcceleratorPlatform

__all__ = [
    "AcceleratorGraphWrapper",
    "AcceleratorPlatform",
]
