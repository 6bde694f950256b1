"""From what a host passes as `platform=` to a platform."""

from __future__ import annotations

from graphrt.core.base import PlatformUnavailableError
from graphrt.core.device._contract import check_contract
from graphrt.core.device.platform import Platform
from graphrt.core.device.registry import current_platform, get_platform


def resolve_platform(platform: Platform | str | None) -> Platform:
    """A platform from itself, its name, or None for the current one; it must be available."""
    if platform is None:
        return current_platform()
    if isinstance(platform, str):
        return get_platform(platform)
    check_contract(platform.name, platform.contract_version)
    found = platform.availability()
    if not found.available:
        raise PlatformUnavailableError(
            f"platform {platform.name!r} is not available on this machine",
            got=found.reason,
            advice="run `graphrt doctor`, or choose another platform",
        )
    platform.start()
    return platform
