"""The key of compiled code: one list of its parts, and of settings left out, with the reasons."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import fx

from graphrt.compile.cache.key.called import called_code
from graphrt.compile.cache.key.values import Values
from graphrt.compile.cache.key.versions import (
    ambient_state,
    compiler_settings,
    runtime_versions,
)
from graphrt.compile.options import CompileOptions
from graphrt.compile.private_torch.traces import known_of_sizes
from graphrt.compile.trace.sizes import placeholders, value_of
from graphrt.core.base.errors import InvalidOptionError

NOT_IN_KEY = {
    "cache_dir": "where code is kept does not change it",
    "save_format": "pieces are loaded in either form",
    "full": "the name of a piece says of which graph it is",
    "compile_sizes": "the name of a piece says for which size it was compiled",
}
"""The options that are not in the key, and why. All others are, new ones too."""

_TENSOR = torch.Tensor
VARIABLES = re.compile(r"(TORCHINDUCTOR|TORCHDYNAMO|AOT|TRITON)_\w+")
"""Variables of the environment that compilers read, some at any time and not into a setting."""
VARIABLES_NOT_IN_KEY = {
    r"\w+_(DIR|HOME|PATH)": "where something lies does not change it",
    r"\w+_CACHE(_\w+)?": "their own caches are not used to load pieces",
    r"\w+_REMOTE_\w+": "their own caches are not used to load pieces",
    r"\w+_THREADS": "how many compile at once",
    r"\w+_WORKER_\w+": "how many compile at once",
    r"\w*(DEBUG|TRACE|LOG|LOGS|DUMP|PRINT|VERBOSE|PROFILE|PROGRESS)(_\w+)?": "for reading only",
}
"""Patterns of such variables that are not in the key, and why."""


@dataclass
class Compilation:
    """One compilation, of which a key is made: its options and its trace."""

    options: CompileOptions
    graph: fx.GraphModule
    small: Sequence[tuple[str, int]] = ()
    """The axes of size 0 or 1 that the code is for alone."""
    values: Values = field(default_factory=Values)
    """`values.unknown`: dependencies that cannot be compared in the next process. The code is then
    neither kept nor loaded."""

    def key(self) -> CacheKey:
        """The key, of all `PARTS`; `unknown` is complete then."""
        return CacheKey.from_groups({name: part(self) for name, part in PARTS.items()})

    @property
    def devices(self) -> list[torch.device]:
        """All devices that the graph computes on."""
        values = (value_of(node) for node in self.graph.graph.nodes)
        devices = {str(each.device): each.device for each in values if isinstance(each, _TENSOR)}
        return [devices[name] for name in sorted(devices)] or [torch.device("cpu")]


def code_settings(options: CompileOptions) -> dict[str, object]:
    """The options that compiled code depends on, new ones too: a needless miss is better than a
    stale hit."""
    names = (each.name for each in fields(options))
    return {name: getattr(options, name) for name in names if name not in NOT_IN_KEY}


def compiler_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that compilers read, but for `VARIABLES_NOT_IN_KEY`."""
    return {
        name: value
        for name, value in environment.items()
        if VARIABLES.fullmatch(name)
        and not any(re.fullmatch(each, name) for each in VARIABLES_NOT_IN_KEY)
    }


def _settings(compilation: Compilation) -> dict[str, object]:
    return {**code_settings(compilation.options), "small": list(compilation.small)}


def _sizes(compilation: Compilation) -> dict[str, object]:
    """What the trace knows of the sizes: a compiler relies on it, and no piece says it."""
    return known_of_sizes([value_of(node) for node in placeholders(compilation.graph)])


Groups = dict[str, dict[str, Any]]
"""A group of `PARTS` -> name -> value, as JSON types."""


@dataclass(frozen=True)
class CacheKey:
    """`digest` names an entry of the cache; it is a hash of `groups`."""

    digest: str
    groups: Groups

    @classmethod
    def from_groups(cls, groups: Mapping[str, Mapping[str, object]]) -> CacheKey:
        """The key of `groups`: the groups of `PARTS`, or of a file that `to_json` wrote."""
        as_json = {group: _as_json(group, groups.get(group, {})) for group in PARTS}
        text = json.dumps(as_json, sort_keys=True, separators=(",", ":"))
        return cls(hashlib.sha256(text.encode()).hexdigest(), as_json)

    def to_json(self) -> str:
        """For reading, and for `from_groups`."""
        return json.dumps(self.groups, indent=1, sort_keys=True) + "\n"

    def differences(self, other: CacheKey) -> list[str]:
        """The differences from `other`, as "versions.torch: 2.12.0 -> 2.13.0"."""
        return [
            line
            for group in PARTS
            for line in _differences(group, other.groups[group], self.groups[group])
        ]


def _as_json(group: str, values: Mapping[str, object]) -> dict[str, Any]:
    """The values as JSON types, so that a key read from its file equals the one written."""
    try:
        loaded: dict[str, Any] = json.loads(json.dumps(dict(values), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidOptionError(
            f"the {group} of a cache key cannot be compared",
            got=str(error),
            expected="strings, numbers, booleans, None, lists and dicts of them",
            advice="give the name or the digest of anything else",
        ) from error
    return loaded


def _differences(group: str, old: Mapping[str, object], new: Mapping[str, object]) -> Iterator[str]:
    for name in sorted(old.keys() | new.keys()):
        what = f"{group}.{name}"
        if name not in old:
            yield f"{what}: new"
        elif name not in new:
            yield f"{what}: gone"
        elif old[name] != new[name]:
            changed = f"{old[name]} -> {new[name]}"
            yield f"{what}: {'edited' if group == 'called' else changed}"


PARTS: dict[str, Callable[[Compilation], Mapping[str, object]]] = {
    "versions": lambda compilation: runtime_versions(*compilation.devices),
    "settings": _settings,
    "compiler": lambda compilation: compiler_settings(compilation.values),
    "ambient": lambda compilation: ambient_state(*(each.type for each in compilation.devices)),
    "environment": lambda _: compiler_variables(),
    "sizes": _sizes,
    "called": lambda compilation: called_code(compilation.graph, compilation.values),
}
"""Each group of the key, and the function that fills it in."""
