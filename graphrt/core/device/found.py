"""What discovery finds: a platform, or why a plugin could not give one."""

from __future__ import annotations

import importlib
import importlib.util
import threading
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from graphrt.core.base.errors import PlatformConflictError, PlatformError
from graphrt.core.base.homes import public
from graphrt.core.base.log import logger
from graphrt.core.base.option_values import shown
from graphrt.core.device.platform import Availability, Platform

FAILURES = (Exception, SystemExit)
"""What a plugin may raise and is left out for: a library that calls `sys.exit()` when it is
imported must not end the host. Ctrl-C is the user's."""


SLOW_S = 5.0
"""So many seconds nothing of a plugin should take."""


@public("graphrt.errors")
class PluginWarning(UserWarning):
    """A plugin or platform is broken and was left out; `graphrt doctor` shows its traceback."""


@public("graphrt.platforms")
@dataclass
class FoundPlatform:
    """One platform, or one plugin that could not give its platforms.

    `error` is the traceback of what went wrong; then there may be no `name` and no `platform`.
    `blocked` says what forbids the plugin, of which nothing was imported then.
    """

    plugin: str
    origin: Literal["built-in", "plugin"]
    name: str | None = None
    platform: Platform | None = None
    error: str | None = None
    blocked: str | None = None
    _availability: Availability | None = field(default=None, repr=False, compare=False)

    @property
    def availability(self) -> Availability:
        """Whether this machine can run the platform; asked once, then kept."""
        if self._availability is None:
            self._availability = self._ask()
        return self._availability

    def _ask(self) -> Availability:
        if self.platform is None:
            return Availability(False, self.blocked or _last_line(self.error or ""))
        try:
            with said_if_slow(f"availability() of platform {self.name!r} of {self.plugin}"):
                return _checked(self.platform.availability())
        except FAILURES as error:
            return self.failed("availability()", error)

    def failed(self, call: str, error: BaseException) -> Availability:
        """Note that a call of the platform raised: from now on it is not available."""
        self.error = "".join(traceback.format_exception(error)).rstrip()
        _warn(f"platform {self.name!r} of {self.plugin} failed {call}", error)
        self._availability = Availability(False, f"{call} raised {_last_line(self.error)}")
        return self._availability


def _checked(answer: object) -> Availability:
    fields = (getattr(answer, "available", None), getattr(answer, "reason", None))
    if not isinstance(answer, Availability) or [type(each) for each in fields] != [bool, str]:
        raise PlatformError(
            "availability() returned something else than whether the platform is available",
            got=shown(answer),
            expected="an Availability of a bool and a str",
            advice='return Availability(False, "no driver")',
        )
    return answer


@contextmanager
def said_if_slow(what: str) -> Iterator[None]:
    """Log what a host waits for, if it takes long: a plugin that hangs hangs its host, for nothing
    can end what it does, but not without being named."""
    advice = f"{what} has taken {SLOW_S:g} s and is not done; if it hangs, leave its plugin out"
    timer = threading.Timer(
        SLOW_S, logger.warning, (f"{advice} (GRAPHRT_BLOCK_PLUGINS, or GRAPHRT_PLATFORM=cpu)",)
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def built_in(name: str, path: str) -> FoundPlatform | None:
    """The built-in platform at `path`; None if graphrt was installed without its module."""
    module, _, attribute = path.partition(":")
    try:
        if not _has_module(module):
            return None
        platform = getattr(importlib.import_module(module), attribute)()
    except FAILURES as error:
        found = broken("graphrt", "built-in", error, f"could not supply {name!r}")
        found.name = name
        return found
    return FoundPlatform("graphrt", "built-in", platform.name, platform)


def _has_module(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        # Only a missing package of this path means "not there"; else its own import is broken.
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            return False
        raise


def broken(
    plugin: str, origin: Literal["built-in", "plugin"], error: BaseException, what: str
) -> FoundPlatform:
    """The record of a plugin that `what` happened to; warns about it too."""
    _warn(f"graphrt plugin {plugin} {what} and is left out", error)
    trace = "".join(traceback.format_exception(error)).rstrip()
    return FoundPlatform(plugin, origin, error=trace)


def platform_of(found: FoundPlatform) -> Platform:
    """The platform of one that is usable."""
    assert found.platform is not None, "only usable platforms are selected"
    return found.platform


def refuse_two_of_a_name(usable: Iterable[FoundPlatform]) -> None:
    """Raise `PlatformConflictError` where two plugins claim one name."""
    owners: dict[str | None, FoundPlatform] = {}
    for each in usable:
        first = owners.setdefault(each.name, each)
        if first is not each:
            raise PlatformConflictError(
                f"two plugins supply a platform called {each.name!r}",
                got=f"{first.plugin} and {each.plugin}",
                expected="one plugin for one name",
                advice="uninstall one of them, or rename its platform",
            )


def _warn(what: str, error: BaseException) -> None:
    message = f"{what}: {type(error).__name__}: {error} (`graphrt doctor` shows the traceback)"
    warnings.warn(message, PluginWarning, stacklevel=3)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
