"""From what a host passes as `platform=` to a platform and its wrapper class."""

from __future__ import annotations

import importlib
from typing import Any

from graphrt.core.base import PlatformError, PlatformUnavailableError
from graphrt.core.device.platform import Platform
from graphrt.core.device.registry import current_platform, get_platform


def resolve_platform(platform: Platform | str | None) -> Platform:
    """A platform from itself, its name, or None for the current one; it must be available."""
    if platform is None:
        return current_platform()
    if isinstance(platform, str):
        return get_platform(platform)
    found = platform.availability()
    if not found.available:
        raise PlatformUnavailableError(
            f"platform {platform.name!r} is not available on this machine",
            got=found.reason,
            advice="run `graphrt doctor`, or choose another platform",
        )
    platform.start()
    return platform


def wrapper_class(platform: Platform) -> Any:
    """The class behind `get_static_graph_wrapper_cls()`."""
    path = platform.get_static_graph_wrapper_cls()
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlatformError(
            f"the wrapper class of platform {platform.name!r} cannot be imported",
            got=path,
            expected="the dotted path of a GraphWrapper subclass",
            advice="fix get_static_graph_wrapper_cls() of the platform",
        ) from error
