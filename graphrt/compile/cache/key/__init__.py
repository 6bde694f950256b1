"""The key of compiled code: everything that it depends on, from one list (`parts`)."""

from graphrt.compile.cache.key.code import covers
from graphrt.compile.cache.key.groups import GROUPS, CacheKey
from graphrt.compile.cache.key.parts import (
    NOT_IN_KEY,
    PARTS,
    Compilation,
    code_settings,
    compiler_variables,
)
from graphrt.compile.cache.key.settings import compiler_settings
from graphrt.compile.cache.key.sources import TracedSources
from graphrt.compile.cache.key.values import Values
from graphrt.compile.cache.key.versions import cpu_features, runtime_versions

__all__ = [
    "GROUPS",
    "NOT_IN_KEY",
    "PARTS",
    "CacheKey",
    "Compilation",
    "TracedSources",
    "Values",
    "code_settings",
    "compiler_settings",
    "compiler_variables",
    "covers",
    "cpu_features",
    "runtime_versions",
]
