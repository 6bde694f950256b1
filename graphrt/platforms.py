"""What the author of a platform plugin imports: the device contract, the hook, and the registry.

A plugin is a module with a `@hookimpl` function `graphrt_platforms()` that returns `Platform`
objects, announced under the entry-point group `graphrt`; `graphrt.testing.PlatformConformance` is
the suite that tells whether a platform behaves. `Captures`, `PoolMemory` and `weak_alias` are parts
that platforms over a caching allocator of torch have in common.
"""

from __future__ import annotations

from graphrt.core.capture import GraphWrapper, wrapper_class
from graphrt.core.device import (
    CONTRACT_VERSION,
    PLATFORM_VARIABLE,
    Allocator,
    AllowedPlugins,
    Availability,
    Capability,
    Captures,
    DeviceEvent,
    DeviceGraph,
    FoundPlatform,
    GraphPointers,
    GraphRead,
    GraphWork,
    Limits,
    Memory,
    MemoryBlock,
    MemoryFigures,
    Platform,
    PlatformHooks,
    PlatformRegistry,
    PoolHandle,
    PoolMemory,
    StreamRoom,
    TaskUpdate,
    UpdateFigures,
    current_platform,
    error_chain,
    get_platform,
    hookimpl,
    installed_platforms,
    register,
    resolve_platform,
    weak_alias,
)

__all__ = [
    "CONTRACT_VERSION",
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
    "GraphWrapper",
    "Limits",
    "Memory",
    "MemoryBlock",
    "MemoryFigures",
    "Platform",
    "PlatformHooks",
    "PlatformRegistry",
    "PoolHandle",
    "PoolMemory",
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
