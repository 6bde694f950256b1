"""What the author of a platform plugin imports: the device contract, the hook, and the registry.

A plugin is a module with a `@hookimpl` function `graphrt_platforms()` that returns `Platform`
objects, announced under the entry-point group `graphrt`; `graphrt.testing.PlatformConformance` is
the suite that tells whether a platform behaves. `Captures`, `PoolMemory` and `weak_alias` are parts
that platforms over a caching allocator of torch have in common.
"""

from __future__ import annotations

from graphrt._homes import at_home
from graphrt.core.capture.wrapper import GraphWrapper, wrapper_class
from graphrt.core.device.captures import Captures, Memory
from graphrt.core.device.contract import (
    CONTRACT_VERSION,
    Capability,
    DeviceEvent,
    DeviceGraph,
    GraphPointers,
    GraphWork,
    MemoryBlock,
    MemoryFigures,
    StreamRoom,
    TaskUpdate,
    UpdateFigures,
    error_chain,
)
from graphrt.core.device.platform import Availability, Platform
from graphrt.core.device.pool_memory import (
    Allocator,
    PoolHandle,
    PoolMemory,
    SavedMemory,
    weak_alias,
)
from graphrt.core.device.registry import (
    PLATFORM_VARIABLE,
    FoundPlatform,
    PlatformHooks,
    PlatformRegistry,
    current_platform,
    get_platform,
    hookimpl,
    installed_platforms,
    register,
    resolve_platform,
)

__all__ = [
    "CONTRACT_VERSION",
    "PLATFORM_VARIABLE",
    "Allocator",
    "Availability",
    "Capability",
    "Captures",
    "DeviceEvent",
    "DeviceGraph",
    "FoundPlatform",
    "GraphPointers",
    "GraphWork",
    "GraphWrapper",
    "Memory",
    "MemoryBlock",
    "MemoryFigures",
    "Platform",
    "PlatformHooks",
    "PlatformRegistry",
    "PoolHandle",
    "PoolMemory",
    "SavedMemory",
    "StreamRoom",
    "TaskUpdate",
    "UpdateFigures",
    "current_platform",
    "error_chain",
    "get_platform",
    "hookimpl",
    "installed_platforms",
    "register",
    "resolve_platform",
    "weak_alias",
    "wrapper_class",
]

at_home(__name__, *map(globals().__getitem__, __all__))
