"""The compile cache: compiled pieces on disk, for the next start with the same code.

    <directory>/<key>/key.json              what the key was made of
    <directory>/<key>/rank_0/manifest.json  files and checksums; without it there is no entry
    <directory>/<key>/rank_0/run-1f0c.../   artifacts, as one process wrote them
    <directory>/<key>/rank_0/*.py           written for reading, never run

An entry holds code that will be run, so the directory must be trusted like the program itself: only
this user and root may change what is read (`permissions.py`), and what is loaded is a copy of the
very bytes that were checked. The checksums find damage; they are no signature. Nothing is locked: a
writer works in a directory of its own, and its manifest appears in one step or not at all.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, cast

from graphrt.compile.cache.entry import CacheEntry, CacheFigures
from graphrt.compile.cache.key.parts import CacheKey
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.option_values import shown

DIRECTORY_VARIABLE = "GRAPHRT_CACHE_DIR"
DISABLE_VARIABLE = "GRAPHRT_DISABLE_COMPILE_CACHE"
FORMAT_VARIABLE = "GRAPHRT_COMPILE_CACHE_SAVE_FORMAT"

SaveFormat = Literal["binary", "unpacked"]
SAVE_FORMATS = ("binary", "unpacked")

_RANK = re.compile(r"\w[\w.\-]*")
_FLAGS = {"": False, "0": False, "false": False, "1": True, "true": True}


class CompileCache:
    """Compiled artifacts of one rank.

    What is None comes from `GRAPHRT_CACHE_DIR` (else a directory below the user's cache),
    `GRAPHRT_COMPILE_CACHE_SAVE_FORMAT` (else "binary") and `GRAPHRT_DISABLE_COMPILE_CACHE`.
    `save_format` is how artifacts that can be saved in two ways are saved; both are loaded.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        rank: int | str = 0,
        save_format: str | None = None,
        enabled: bool | None = None,
    ) -> None:
        self.directory = default_directory() if directory is None else Path(directory).expanduser()
        self.save_format = _save_format(save_format)
        self.enabled = not _disabled() if enabled is None else enabled
        self.rank = _checked_rank(rank)
        self.figures = CacheFigures()

    def open(self, key: CacheKey) -> CacheEntry:
        """The entry of a key, which need not be there yet; nothing is written."""
        return CacheEntry(
            self.directory,
            key,
            rank=self.rank,
            save_format=self.save_format,
            enabled=self.enabled,
            figures=self.figures,
        )


def default_directory() -> Path:
    """`GRAPHRT_CACHE_DIR`, or graphrt/compile below the user's cache directory."""
    given = os.environ.get(DIRECTORY_VARIABLE)
    if given:
        return Path(given).expanduser()
    user = os.environ.get("XDG_CACHE_HOME", "")
    # A relative one is to be ignored, says the specification.
    return (Path(user) if os.path.isabs(user) else Path.home() / ".cache") / "graphrt" / "compile"


def _disabled() -> bool:
    text = os.environ.get(DISABLE_VARIABLE, "").strip().lower()
    if text not in _FLAGS:
        raise InvalidOptionError(
            f"{DISABLE_VARIABLE} has a wrong value",
            got=shown(text),
            expected="1 or 0",
            advice=f"{DISABLE_VARIABLE}=1",
        )
    return _FLAGS[text]


def _save_format(given: str | None) -> SaveFormat:
    text = given or os.environ.get(FORMAT_VARIABLE) or SAVE_FORMATS[0]
    if text not in SAVE_FORMATS:
        raise InvalidOptionError(
            "unknown save format of the compile cache",
            got=shown(text),
            expected=" or ".join(SAVE_FORMATS),
            advice=f"{FORMAT_VARIABLE}=unpacked, to look into what the compiler made",
        )
    return cast(SaveFormat, text)


def _checked_rank(rank: int | str) -> str:
    if _RANK.fullmatch(str(rank)) is None:
        raise InvalidOptionError(
            "a rank names a directory of the compile cache",
            got=shown(rank),
            expected="a number, or letters, digits, '_', '-' and '.'",
            advice="rank=0",
        )
    return str(rank)
