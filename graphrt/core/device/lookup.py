"""From what a host passes as `platform=` to a platform."""

from __future__ import annotations

from graphrt.core.base.errors import PlatformUnavailableError
from graphrt.core.base.homes import public
from graphrt.core.base.option_values import check_kind
from graphrt.core.device._contract import check_contract
from graphrt.core.device.platform import Platform
from graphrt.core.device.registry import current_platform, get_platform


@public("graphrt.platforms")
def resolve_platform(platform: Platform | str | None) -> Platform:
    """A platform from itself, its name, or None for the current one.

    Raises `PlatformUnavailableError`, `UnknownPlatformError` and what else keeps one from use.
    """
    if platform is None:
        return current_platform()
    if isinstance(platform, str):
        return get_platform(platform)
    check_platform(platform)
    found = platform.availability()
    if not found.available:
        raise PlatformUnavailableError(
            f"platform {platform.name!r} is not available on this machine",
            got=found.reason,
            advice="run `graphrt doctor`, or choose another platform",
        )
    platform.start()
    return platform


def given_platform(platform: Platform | str | None) -> Platform:
    """`resolve_platform`, but one that is given itself need not be available: to plan for it."""
    if not isinstance(platform, Platform):
        return resolve_platform(platform)
    check_contract(platform)
    return platform


def check_platform(platform: object) -> None:
    """Raise for what is given as a platform and is none, `InvalidOptionError`, or one of another
    version of the contract, `ContractVersionError`; whether it is available is not asked."""
    check_kind("platform", platform, Platform, optional=False, example='get_platform("cpu")')
    check_contract(platform)
