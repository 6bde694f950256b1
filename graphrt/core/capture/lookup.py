"""From a platform to the class of its wrappers."""

from __future__ import annotations

import importlib

from graphrt.core.base import PlatformError
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.device import Platform, given_platform


def wrapper_class(platform: Platform | str | None) -> type[GraphWrapper]:
    """The class behind `get_static_graph_wrapper_cls()` of a platform, by itself or its name, or of
    the current one.

    Raises `PlatformError` where that path cannot be imported, `ContractVersionError` for a platform
    of another version of the device contract.
    """
    platform = given_platform(platform)
    path = platform.get_static_graph_wrapper_cls()
    module, _, name = path.rpartition(".")
    try:
        found: type[GraphWrapper] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlatformError(
            f"the wrapper class of platform {platform.name!r} cannot be imported",
            got=path,
            expected="the dotted path of a GraphWrapper subclass",
            advice="fix get_static_graph_wrapper_cls() of the platform",
        ) from error
    return found
