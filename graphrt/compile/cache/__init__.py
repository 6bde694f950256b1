"""The compile cache: compiled pieces on disk, under a key of all that they depend on."""

from graphrt.compile.cache.disk import CompileCache, default_directory
from graphrt.compile.cache.entry import CacheEntry
from graphrt.compile.cache.key import (
    CacheKey,
    Compilation,
    TracedSources,
    Values,
    code_settings,
    covers,
    cpu_features,
    runtime_versions,
)
from graphrt.compile.cache.listing import StoredKey, find_key, remove, stored_keys
from graphrt.compile.cache.log import CompileCacheWarning, size_text, warn

__all__ = [
    "CacheEntry",
    "CacheKey",
    "Compilation",
    "CompileCache",
    "CompileCacheWarning",
    "StoredKey",
    "TracedSources",
    "Values",
    "code_settings",
    "covers",
    "cpu_features",
    "default_directory",
    "find_key",
    "remove",
    "runtime_versions",
    "size_text",
    "stored_keys",
    "warn",
]
