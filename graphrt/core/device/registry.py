"""Finding platforms: the pluggy hook, discovery, and which platform is the current one.

1. A platform comes from a plugin that the process registers, from an installed plugin (an entry
   point), or is built in. Each is loaded by itself: one that fails is warned about and left out.
2. A `FoundPlatform` keeps a platform, or the reason why there is none.
3. `get` takes one by name, `current` the forced one, else an out-of-tree one, else a built-in.

Nothing is looked for before somebody asks, and asking for a built-in by name imports no plugin.
`GRAPHRT_PLUGINS` says which installed plugins are imported at all.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

import pluggy

from graphrt.core.base.errors import PlatformError, warn_caller
from graphrt.core.base.log import logger
from graphrt.core.base.option_values import check_kind, flag, refused, shown
from graphrt.core.base.private_torch import imported
from graphrt.core.base.texts import error_line, printable
from graphrt.core.device.contract import Capability, check_contract
from graphrt.core.device.platform import Availability, Platform

T = TypeVar("T")

FAILURES = (Exception, SystemExit)
"""Errors for which a plugin is left out: a library that calls `sys.exit()` when it is imported must
not end the host. A Ctrl-C is the user's, and is raised."""


class PluginWarning(UserWarning):
    """A plugin or platform is broken and was left out: `graphrt doctor` shows its traceback. Or a
    plugin's platform became the default, and nobody had named it."""

    __module__ = "graphrt.errors"


@dataclass
class FoundPlatform:
    """One platform, or one plugin that could not give its platforms.

    `error` is the traceback of what went wrong; then there may be no `name` and no `platform`.
    """

    plugin: str
    origin: Literal["built-in", "plugin"]
    name: str | None = None
    platform: Platform | None = None
    error: str | None = None
    file: str | None = None
    """Where the code of a plugin is; None for a built-in platform."""
    _availability: Availability | None = field(default=None, repr=False, compare=False)
    """The answer of the platform; None before it was asked."""
    _undone: Callable[[], AbstractContextManager[None]] = field(
        default=nullcontext, repr=False, compare=False
    )
    """Around a call of the platform: see `PlatformRegistry`."""

    @property
    def availability(self) -> Availability:
        """Whether this machine can run the platform; asked once, then kept."""
        if self._availability is None and self.platform is not None:
            ask = partial(_availability_of, self.platform)
            # Where it fails, `failed` gives the answer.
            self._availability = self.result(ask, "failed availability()") or self._availability
        return self._availability or Availability(False)

    def result(self, call: Callable[[], T], how: str | None = None) -> T | None:
        """What a call of the plugin's code gives. With `how`, an error is noted, and gives None."""
        try:
            with self._undone():
                return call()
        except FAILURES as error:
            if how is None:
                raise
            self.failed(how, error)
        except BaseException:
            self._interrupted()
            raise
        return None

    def failed(self, how: str, error: BaseException) -> FoundPlatform:
        """Note, and warn, that a call of the plugin raised: it is not available from now on."""
        self.error = printable(_traceback_of(error))
        what = printable(" ".join(error_line(error).split()))
        self._availability = Availability(False, f"{how}: {what}")
        whose = f"plugin {printable(self.plugin)}"
        if self.name is not None:
            whose = f"platform {self.name!r} of {printable(self.plugin)}"
        where = "" if self.file is None else f"; {self.file}; {PLUGINS_VARIABLE}=off imports none"
        warnings.warn(
            f"{whose} {how} and is left out: {what} (`graphrt doctor` shows the traceback{where})",
            PluginWarning,
            stacklevel=3,
        )
        return self

    def _interrupted(self) -> None:
        """Log how to leave out a plugin that hangs, or raises what ends the process."""
        if self.file is not None:
            text = "interrupted in plugin %s (%s); %s=off imports no plugins"
            logger.warning(text, self.plugin, self.file, PLUGINS_VARIABLE)


ENTRY_POINT_GROUP = "graphrt"
"""The group of entry points by which installed plugins are found."""
PLATFORM_VARIABLE = "GRAPHRT_PLATFORM"
"""The variable of the environment that forces a platform by name."""
PLUGINS_VARIABLE = "GRAPHRT_PLUGINS"
"""The variable that names the installed plugins that are imported, or has "off"; unset, all are."""

BUILT_IN_PLATFORMS: Mapping[str, str] = {
    "ascend": "graphrt.ascend.platform:AscendPlatform",
    "cuda": "graphrt.cuda.platform:CudaPlatform",
    "accelerator": "graphrt.accelerator.platform:AcceleratorPlatform",
    "cpu": "graphrt.cpu.platform:CpuPlatform",
}
"""Dotted paths in order of preference; those whose module is not installed are left out."""

hookspec = pluggy.HookspecMarker("graphrt")
hookimpl = pluggy.HookimplMarker("graphrt")


class PlatformHooks:
    """What a plugin may implement."""

    @hookspec
    def graphrt_platforms(self) -> Platform | Iterable[Platform]:
        """The platforms of this plugin. Called once; must not touch a device."""
        raise NotImplementedError


class PlatformRegistry:
    """The platforms that plugins and graphrt itself supply. Nothing is looked for before use.

    `built_ins` maps names to dotted paths, preferred first; `group` is the entry-point group of
    plugins, None for no installed plugins at all.
    """

    def __init__(
        self,
        built_ins: Mapping[str, str] = BUILT_IN_PLATFORMS,
        group: str | None = ENTRY_POINT_GROUP,
    ) -> None:
        self._built_ins = dict(built_ins)
        self._group = group
        self._plugins = pluggy.PluginManager("graphrt")
        self._plugins.add_hookspecs(PlatformHooks)
        # (origin, name of a plugin or a built-in) -> all that came of it.
        self._found: dict[tuple[str, str], list[FoundPlatform]] = {}
        # Installed plugin -> the file of its code.
        self._files: dict[str, str] = {}
        # Plugins that are installed and could not be imported; None before they are looked for.
        self._broken: list[FoundPlatform] | None = None
        # Platforms that the user knows of: named to `get`, or warned of as the default.
        self._known: set[str | None] = set()
        # Plugins that `GRAPHRT_PLUGINS` names.
        self._named: set[str] = set()
        # Device types that a platform by name only, such as a simulator, was taken for.
        self._simulated_types: set[str] = set()
        # Held while anything is looked for: two threads may ask first.
        self._lock = threading.RLock()
        # Each plugin that was registered, behind the thread that did it.
        self._registered: list[tuple[int, str]] = []
        # Whether plugins are being imported, or asked for their platforms.
        self._is_looking = False

    def register(self, plugin: object, name: str | None = None) -> str:
        """Add a plugin (a module or object with the hook) of this process; returns its name.

        Raises `PlatformError` for one without the hook, and pluggy's own error for one that is
        there already, or that implements the hook in another way than specified.
        """
        with self._lock:
            added = str(self._plugins.register(plugin, name))
            if not self._plugins.get_hookcallers(plugin):
                self._plugins.unregister(name=added)
                raise PlatformError(
                    "this is no plugin: it has no graphrt hook",
                    got=shown(plugin),
                    expected="@graphrt.platforms.hookimpl def graphrt_platforms()",
                    advice="examples/platform_plugin is a plugin that works",
                )
            self._registered.append((threading.get_ident(), added))
            return added

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Around a call of a plugin: where it raises, what it has registered meanwhile is gone."""
        before = len(self._registered)
        try:
            yield
        except BaseException:
            for thread, name in self._registered[before:]:
                if thread == threading.get_ident() and self._plugins.has_plugin(name):
                    self._plugins.unregister(name=name)
                    self._found.pop(("plugin", name), None)
            raise

    def platforms(self) -> tuple[FoundPlatform, ...]:
        """All that was found, plugins first; broken ones have an `error`. Never raises for one."""
        with self._lock:
            if self._is_looking:
                raise PlatformError(
                    "a plugin asks for platforms while it is imported, or asked for its own",
                    expected="a plugin that only gives its platforms then",
                    advice="ask where the platform is used, as in its start()",
                )
            self._is_looking = True
            try:
                return self._all_found()
            finally:
                self._is_looking = False

    def _all_found(self) -> tuple[FoundPlatform, ...]:
        """See `platforms`."""
        if self._broken is None:
            self._broken = self._load_installed()
        records = list(self._broken)
        # Each plugin is asked by itself: pluggy stops calling the others when one raises.
        for hook in self._plugins.hook.graphrt_platforms.get_hookimpls():
            name = hook.plugin_name
            # A plugin may register itself, or any object, while it is imported.
            file = self._files.get(name) or _file_of_hook(hook)
            plugin = FoundPlatform(name, "plugin", file=file, _undone=self._undone)
            records += self._load(plugin, partial(_platforms_of, hook))
        for name in self._built_ins:
            records += self._built_in(name)
        return tuple(records)

    def get(self, name: str, *, must_be_available: bool = True) -> Platform:
        """The platform of that name. A built-in is found without importing any plugin, which may
        hang or end the process.

        Raises `PlatformError` if there is none of that name, if two plugins claim it, and if this
        machine cannot run it.
        """
        check_kind("name", name, str, optional=False)
        flag("must_be_available", must_be_available)
        with self._lock:
            built_in = self._built_in(name) if name in self._built_ins else []
        named = [each for each in built_in if each.platform is not None]
        named = named or [each for each in self._usable() if each.name == name]
        if not named:
            broken = [each.plugin for each in self.platforms() if each.error]
            left_out = f" ({', '.join(broken)} is broken: see graphrt doctor)" if broken else ""
            raise PlatformError(
                "no platform of that name is installed",
                got=shown(name),
                expected=", ".join(sorted(str(each.name) for each in self._usable())) or "none",
                advice=f"install the plugin of {name!r}{left_out}, or use one of those",
            )
        _refuse_two_of_a_name(named)
        self._known.add(name)
        platform: Platform = named[0].platform  # type: ignore[assignment]
        if not must_be_available:
            return platform
        _check_available(platform, named[0].availability)
        named[0].result(partial(_run_start, platform))
        if platform.by_name_only:
            self._simulated_types.add(platform.device_type)
        return platform

    def current(self, environ: Mapping[str, str] | None = None) -> Platform:
        """The default platform: the forced one, else the out-of-tree one, else a built-in.

        `GRAPHRT_PLATFORM` forces one by name. Two out-of-tree platforms that are both available
        raise `PlatformError`.
        """
        check_kind("environ", environ, Mapping)
        environ = os.environ if environ is None else environ
        forced = environ.get(PLATFORM_VARIABLE, "").strip()
        if forced:
            return self.get(forced)
        usable = [each for each in self._usable() if self._may_be_default(each.platform)]
        _refuse_two_of_a_name(usable)
        available = [each for each in usable if each.availability.available]
        out_of_tree = [each for each in available if each.origin == "plugin"]
        if len(out_of_tree) > 1:
            advice = f"set {PLATFORM_VARIABLE}={out_of_tree[0].name}, or uninstall the others"
            raise _conflict("several out-of-tree platforms are available", out_of_tree, advice)
        if not available:
            reasons = "; ".join(f"{each.name}: {each.availability.reason}" for each in usable)
            raise PlatformError(
                "no platform is available here",
                got=reasons or "none found",
                expected="at least the CPU's",
                advice="graphrt doctor shows what was found",
            )
        chosen = (out_of_tree or available)[0]
        # A registry without a group has the host's own plugins alone.
        if out_of_tree and self._group is not None:
            self._announce(chosen)
        platform: Platform = chosen.platform  # type: ignore[assignment]
        chosen.result(partial(_run_start, platform))
        return platform

    def _announce(self, chosen: FoundPlatform) -> None:
        """Warn once that a plugin's platform is the default, if nobody has named one of the two."""
        if chosen.name in self._known or chosen.plugin in self._named:
            return
        self._known.add(chosen.name)
        warn_caller(
            f"platform {chosen.name!r} of plugin {chosen.plugin} is the default here: "
            f"{chosen.file}. To keep it: {PLATFORM_VARIABLE}={chosen.name}. To import no "
            f"plugins: {PLUGINS_VARIABLE}=off",
            PluginWarning,
        )

    def _may_be_default(self, platform: Any) -> bool:
        # A stand-in for a device's library makes the platform of the real device look available.
        return not platform.by_name_only and platform.device_type not in self._simulated_types

    def _usable(self) -> list[FoundPlatform]:
        """All platforms that were found, whether or not they are available here."""
        return [each for each in self.platforms() if each.platform is not None]

    def _load_installed(self) -> list[FoundPlatform]:
        """Import and register the installed plugins that `GRAPHRT_PLUGINS` allows; returns a record
        of each that failed."""
        allowed = _named_plugins()
        if self._group is None or "off" in allowed:
            return []
        unknown = set(allowed)
        installed, broken = _entry_points(self._group)
        for entry_point in installed:
            own, owner = printable(entry_point.name, kept=""), _name_of(entry_point.dist)
            name = f"{owner}:{own}" if owner else own
            names = {name, own, owner}
            unknown -= names
            if allowed and not allowed & names:
                continue
            file = _file_of_distribution(entry_point.dist)
            record = FoundPlatform(name, "plugin", file=file, _undone=self._undone)
            load = partial(self._import, record, entry_point)
            added = record.result(load, "could not be imported")
            if added is None:
                broken.append(record)
                continue
            self._files = {**dict.fromkeys(added, _file_of(entry_point.module)), **self._files}
            if allowed:
                self._named |= added
        if unknown:
            warn_caller(
                f"{PLUGINS_VARIABLE} names {', '.join(map(repr, sorted(unknown)))}, and no such "
                "plugin is installed",
                PluginWarning,
            )
        return broken

    def _import(self, record: FoundPlatform, entry_point: EntryPoint) -> set[str]:
        """Import an installed plugin; returns the names that it, or what it registered, has."""
        before = len(self._registered)
        _check_entry_point(entry_point)
        record.file = _file_of(entry_point.module)
        logger.info("importing plugin %s (%s)", record.plugin, printable(entry_point.value))
        plugin = entry_point.load()
        added = {each for _, each in self._registered[before:]}
        if self._plugins.is_registered(plugin):
            added |= {str(self._plugins.get_name(plugin))}
        # It may have registered an object of its own instead.
        return added or {self.register(plugin, record.plugin)}

    def _load(
        self, plugin: FoundPlatform, ask: Callable[[], list[Platform]]
    ) -> list[FoundPlatform]:
        """The platforms of a plugin or a built-in, which is asked once."""
        source = plugin.origin, plugin.name or plugin.plugin
        if source not in self._found:
            platforms = plugin.result(ask, "could not give its platforms")
            each_of = [replace(plugin, name=p.name, platform=p) for p in platforms or ()]
            self._found[source] = [plugin] if platforms is None else each_of
        return self._found[source]

    def _built_in(self, name: str) -> list[FoundPlatform]:
        """The built-in platform of that name; empty if graphrt was installed without its module."""
        plugin = FoundPlatform("graphrt", "built-in", name)
        return self._load(plugin, partial(_made_of, self._built_ins[name]))


# A process-wide default, for hosts that pass no registry. It holds what is installed, which is
# the same for all of them; who registers plugins of their own makes a registry of their own.
_default = PlatformRegistry()


def current_platform() -> Platform:
    """The platform that is used where none is given; see `PlatformRegistry.current`."""
    return _default.current()


def installed_platforms() -> tuple[FoundPlatform, ...]:
    """Every platform that is installed, available or not, and every plugin that is broken."""
    return _default.platforms()


def get_platform(name: str | None = None, *, must_be_available: bool = True) -> Platform:
    """The installed platform of that name, or the current one for None."""
    if name is None:
        return current_platform()
    return _default.get(name, must_be_available=must_be_available)


def register(plugin: object, name: str | None = None) -> str:
    """Add a plugin to the default registry of this process; returns its name."""
    return _default.register(plugin, name)


def resolve_platform(
    platform: Platform | str | None, *, must_be_available: bool = True
) -> Platform:
    """A platform from itself, its name, or None for the current one. One that is given itself need
    not be available where it is only planned for.

    Raises `PlatformError`, and what else keeps one from use.
    """
    if platform is None:
        return _default.current()
    if isinstance(platform, str):
        return _default.get(platform)
    check_kind("platform", platform, Platform, optional=False, example='get_platform("cpu")')
    check_contract(platform)
    if must_be_available:
        _check_available(platform, platform.availability())
        _run_start(platform)
    return platform


def _availability_of(platform: Platform) -> Availability:
    answer = platform.availability()
    return Availability(answer.available, str(answer.reason))


def _check_available(platform: Platform, found: Availability) -> None:
    """Raise `PlatformError` for a platform that a host has asked for and cannot have."""
    if not found.available:
        raise PlatformError(
            f"platform {platform.name!r} is not available on this machine",
            got=found.reason or "no reason given",
            expected="a machine that can run it",
            advice="`graphrt doctor` shows which platforms are",
        )


def _run_start(platform: Any) -> None:
    """Start a platform. Raises `PlatformError` where its own code fails."""
    try:
        platform.start()
        capabilities = frozenset(platform.capabilities)
    except PlatformError:
        raise
    except (Exception, SystemExit) as error:
        raise PlatformError(
            f"platform {platform.name!r} cannot start",
            got=error_line(error),
            expected="a start() that returns, and capabilities",
            advice=f"{PLATFORM_VARIABLE}=cpu, or {PLUGINS_VARIABLE}=off, leaves it alone",
        ) from error

    # Of words instead, every step would run eagerly, and nothing would say why.
    if not all(isinstance(each, Capability) for each in capabilities):
        raise PlatformError(
            f"platform {platform.name!r} has capabilities that are none",
            got=shown(capabilities),
            expected="members of graphrt.platforms.Capability",
            advice="capabilities = frozenset({Capability.CAPTURE})",
        )


def _refuse_two_of_a_name(usable: Iterable[FoundPlatform]) -> None:
    """Raise `PlatformError` where two plugins claim one name."""
    owners: dict[str | None, FoundPlatform] = {}
    for each in usable:
        first = owners.setdefault(each.name, each)
        if first is not each:
            what = f"two plugins supply a platform called {each.name!r}"
            advice = "uninstall one of them, or rename its platform"
            raise _conflict(what, [first, each], advice)


def _conflict(what: str, platforms: list[FoundPlatform], advice: str) -> PlatformError:
    got = " and ".join(f"{each.name!r} of {each.plugin}" for each in platforms)
    return PlatformError(what, got=got, expected="one", advice=advice)


def _named_plugins() -> set[str]:
    """The plugins that `GRAPHRT_PLUGINS` names, and "off"; empty if it is not set."""
    names = os.environ.get(PLUGINS_VARIABLE, "").split(",")
    return {each.strip() for each in names} - {""}


def _entry_points(group: str) -> tuple[list[EntryPoint], list[FoundPlatform]]:
    """The entry points of a group, and a record of each distribution whose own cannot be read."""
    try:
        return [*entry_points(group=group)], []
    except FAILURES:
        # Of one distribution; the loop finds out which.
        pass
    points: dict[str, list[EntryPoint]] = {}
    broken = []
    for dist in distributions():
        try:
            # Of two installations of a distribution Python imports the first one.
            named = _name_of(dist) or _file_of_distribution(dist)
            points.setdefault(named, [*dist.entry_points.select(group=group)])
        except FAILURES as error:
            file = _file_of_distribution(dist)
            record = FoundPlatform(file, "plugin", file=file)
            broken.append(record.failed("has entry points that cannot be read", error))
    return [point for listed in points.values() for point in listed], broken


def _traceback_of(error: BaseException) -> str:
    """Its traceback as text; its message alone where its class has odd notes."""
    try:
        return "".join(traceback.format_exception(error)).rstrip()
    except FAILURES:
        return error_line(error)


def _name_of(dist: Distribution | None) -> str | None:
    """The name of a distribution; None if its metadata cannot be read, or has none."""
    try:
        return printable(dist.name, kept="") if dist is not None and dist.name else None
    except FAILURES:
        return None


def _check_entry_point(point: EntryPoint) -> None:
    """Raise `PlatformError` for an entry point that was not written by a build tool."""
    if point.dist is not None and not _name_of(point.dist):
        what = "the METADATA of its distribution has no readable Name"
        raise PlatformError(what, expected="Name: ...", advice="install it again")
    if point.pattern.match(point.value) is None:
        what, advice = "its entry point cannot be read", "install it again"
        raise PlatformError(what, got=shown(point.value), expected="module:name", advice=advice)


def _file_of_distribution(dist: Distribution | None) -> str:
    """The folder of a distribution's metadata."""
    # Only Python's own kind of distribution has a path; others know where their packages are.
    place = None if dist is None else getattr(dist, "_path", None) or dist.locate_file("")
    return printable(os.path.abspath(str(place)), kept="")


def _file_of_hook(hook: pluggy.HookImpl) -> str:
    """The file of the code of a registered plugin's hook."""
    code = getattr(inspect.unwrap(hook.function), "__code__", None)
    return _file_of(hook.function.__module__) if code is None else printable(code.co_filename, "")


def _file_of(module: str) -> str:
    """The file of a plugin's module; of its package if the module could not be imported."""
    found = sys.modules.get(module)
    try:
        # Of a package alone, which imports nothing.
        spec = find_spec(module.partition(".")[0]) if found is None else found.__spec__
        place = None if spec is None else spec.origin
    # A module that puts an object in its own place may raise anything.
    except FAILURES:
        place = None
    return printable(place or f"module {module}", kept="")


def _made_of(path: str) -> list[Platform]:
    """The platform of a dotted path; none if its module is not there."""
    module, _, attribute = path.partition(":")
    found = imported(module)
    return [] if found is None else [getattr(found, attribute)()]


def _platforms_of(hook: pluggy.HookImpl) -> list[Platform]:
    """The platforms that a plugin gives."""
    result: Any = hook.function()
    platforms: list[Any] = []
    for each in result if isinstance(result, Iterable) else [result]:
        if not isinstance(each, Platform):
            raise PlatformError(
                "graphrt_platforms() returned something that is no platform",
                got=shown(each),
                expected="an instance of a Platform subclass, or several",
                advice="examples/platform_plugin is a plugin that works",
            )
        check_contract(each)
        for word, value in (("name", each.name), ("device_type", each.device_type)):
            check_kind(word, value, str, optional=False, example='"mynpu"')
            if not value.isprintable() or value.split() != [value]:
                what = f"the platform's {word} is no word that can be printed"
                raise refused(what, value, "a word", f'{word} = "mynpu"')
        flag("by_name_only", each.by_name_only)
        platforms.append(each)
    return platforms
