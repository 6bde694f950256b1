"""The device contract, the platforms that fulfil it, and the memory of their graphs."""

from graphrt.core.device._allowed import BLOCK_VARIABLE, ONLY_VARIABLE, AllowedPlugins
from graphrt.core.device._contract import CONTRACT_VERSION, Capability
from graphrt.core.device._devices import (
    asked_device,
    capture_lock,
    check_memory,
    device_of,
    no_other_capture,
)
from graphrt.core.device.alias import weak_alias
from graphrt.core.device.captures import Captures, Memory, OpenCapture, nested_capture
from graphrt.core.device.error_chain import Unexplained, error_chain
from graphrt.core.device.figures import (
    GraphWork,
    Limits,
    MemoryFigures,
    StreamRoom,
    UpdateFigures,
)
from graphrt.core.device.found import FoundPlatform, PluginWarning
from graphrt.core.device.graph import (
    DeviceEvent,
    DeviceGraph,
    GraphPointers,
    GraphRead,
    MemoryBlock,
    TaskUpdate,
)
from graphrt.core.device.lent_streams import LentStreams, Loan
from graphrt.core.device.lookup import check_platform, given_platform, resolve_platform
from graphrt.core.device.platform import Availability, Platform
from graphrt.core.device.pool_memory import (
    Allocator,
    PoolHandle,
    PoolMemory,
    captured_pool,
    never_destroy,
    pool_handle,
)
from graphrt.core.device.registry import (
    ENTRY_POINT_GROUP,
    PLATFORM_VARIABLE,
    PlatformHooks,
    PlatformRegistry,
    current_platform,
    get_platform,
    hookimpl,
    installed_platforms,
    register,
)

__all__ = [
    "BLOCK_VARIABLE",
    "CONTRACT_VERSION",
    "ENTRY_POINT_GROUP",
    "ONLY_VARIABLE",
    "PLATFORM_VARIABLE",
    "Allocator",
    "AllowedPlugins",
    "Availability",
    "Capability",
    "Captures",
    "DeviceEvent",
    "DeviceGraph",
    "FoundPlatform",
    "GraphPointers",
    "GraphRead",
    "GraphWork",
    "LentStreams",
    "Limits",
    "Loan",
    "Memory",
    "MemoryBlock",
    "MemoryFigures",
    "OpenCapture",
    "Platform",
    "PlatformHooks",
    "PlatformRegistry",
    "PluginWarning",
    "PoolHandle",
    "PoolMemory",
    "StreamRoom",
    "TaskUpdate",
    "Unexplained",
    "UpdateFigures",
    "asked_device",
    "capture_lock",
    "captured_pool",
    "check_memory",
    "check_platform",
    "current_platform",
    "device_of",
    "error_chain",
    "get_platform",
    "given_platform",
    "hookimpl",
    "installed_platforms",
    "nested_capture",
    "never_destroy",
    "no_other_capture",
    "pool_handle",
    "register",
    "resolve_platform",
    "weak_alias",
]
