"""From a platform to the class of its wrappers."""

from __future__ import annotations

import importlib

from graphrt.core.base import PlatformError
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.device import Platform, given_platform


def wrapper_class(platform: Platform | str | None) -> type[GraphWrapper]:
    """The class behind `get_static_graph_wrapper_cls()` of a platform, by itself or its name, or of
    the current one.

    Raises `PlatformError` where that path cannot be imported, or leads to no wrapper of this
    platform, and `ContractVersionError` for a platform of another version of the device contract.
    """
    platform = given_platform(platform)
    path = platform.get_static_graph_wrapper_cls()
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlatformError(
            f"the wrapper class of platform {platform.name!r} cannot be imported",
            got=path,
            expected="the dotted path of a GraphWrapper subclass",
            advice="fix get_static_graph_wrapper_cls() of the platform",
        ) from error
    if not (isinstance(found, type) and issubclass(found, GraphWrapper)):
        raise _not_its_own(platform, path, repr(found))
    # Without a pool it would make one on the platform that it names.
    if found.platform_name != platform.name:
        raise _not_its_own(platform, path, f"platform_name = {found.platform_name!r}")
    return found


def _not_its_own(platform: Platform, path: str, got: str) -> PlatformError:
    return PlatformError(
        f"{path}, the wrapper class of platform {platform.name!r}, belongs to another one, or is "
        "no wrapper",
        got=got,
        expected=f"a GraphWrapper subclass with platform_name = {platform.name!r}",
        advice="give the platform a subclass of its own that says so, and return its path from "
        "get_static_graph_wrapper_cls()",
    )
