"""Which plugins may be imported: all that are installed, but for what a process forbids."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint

from graphrt.core.base.homes import public
from graphrt.core.base.option_values import check_kind, items_of

BLOCK_VARIABLE = "GRAPHRT_BLOCK_PLUGINS"
ONLY_VARIABLE = "GRAPHRT_ONLY_PLUGINS"


@public("graphrt.platforms")
@dataclass(frozen=True)
class AllowedPlugins:
    """Plugins by entry-point name, or `distribution:name`: those of `blocked` are not imported,
    and none but those of `only`, where it is not None.

    A blocked name is met in any case, with `-`, `_` and `.` for one another, as distributions are
    named; one that is allowed is met as it is written. Raises `InvalidOptionError` for a string in
    place of a list.
    """

    blocked: Collection[str] = ()
    only: Collection[str] | None = None

    def __post_init__(self) -> None:
        for name in ("blocked", "only"):
            given = getattr(self, name)
            if given is not None or name == "blocked":
                names = items_of(name, given, '["ascend-sim"]')
                for each in names:
                    check_kind(f"a name in {name}", each, str, optional=False)
                object.__setattr__(self, name, frozenset(names))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> AllowedPlugins:
        """What `GRAPHRT_BLOCK_PLUGINS` and `GRAPHRT_ONLY_PLUGINS` say, comma separated; the latter
        allows none where it is set and empty."""
        check_kind("environ", environ, Mapping)
        environ = os.environ if environ is None else environ
        only = environ.get(ONLY_VARIABLE)
        return cls(_names(environ.get(BLOCK_VARIABLE, "")), None if only is None else _names(only))

    def refusal(self, entry_point: EntryPoint) -> str | None:
        """Why the plugin may not be imported; None if it may. Imports nothing."""
        names = names_of(entry_point)
        if {normalized(each) for each in names} & {normalized(each) for each in self.blocked}:
            return f"blocked by {BLOCK_VARIABLE}"
        if self.only is not None and not names & set(self.only):
            return f"blocked: not in {ONLY_VARIABLE}"
        return None

    def missing(self, entry_points: Collection[EntryPoint]) -> tuple[str, ...]:
        """The names that no installed plugin has, such as mistyped ones."""
        plain = {name for each in entry_points for name in names_of(each)}
        loose = {normalized(name) for name in plain}
        found = [each for each in self.blocked if normalized(each) not in loose]
        return tuple(sorted({*found, *(set(self.only or ()) - plain)}))


def plugin_name(entry_point: EntryPoint) -> str:
    """What errors and `graphrt doctor` call a plugin."""
    distribution = "" if entry_point.dist is None else f"{entry_point.dist.name}:"
    return f"{distribution}{entry_point.name}"


def names_of(entry_point: EntryPoint) -> set[str]:
    """What a plugin may be called in a list."""
    return {entry_point.name, plugin_name(entry_point)}


def normalized(name: str) -> str:
    """One spelling for names that distributions take for the same."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _names(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]
