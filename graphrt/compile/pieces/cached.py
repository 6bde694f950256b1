"""Compiled pieces that are kept on disk, and what is written beside them for reading."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from graphrt.compile.backend import CompiledPiece, new_directory
from graphrt.compile.cache import (
    CacheEntry,
    CacheKey,
    CompileCache,
    TracedSources,
    code_settings,
    runtime_versions,
    warn,
)
from graphrt.compile.options import CompileOptions


class KeptPieces:
    """The pieces of one module in the compile cache; a name says all that a piece is made of."""

    def __init__(self, entry: CacheEntry) -> None:
        self._entry = entry

    @classmethod
    def open(
        cls,
        options: CompileOptions,
        codes: Sequence[CodeType],
        device: torch.device | str,
        small: Sequence[tuple[str, int]] = (),
    ) -> KeptPieces:
        """The entry for code that was traced with these options from these sources; `small` are the
        axes of size 0 or 1 that it is for alone."""
        cache = CompileCache(options.cache_dir, rank=_rank(), save_format=options.save_format)
        sources = TracedSources()
        for code in codes:
            # Generated code has no file; what it says is in the pieces.
            if not code.co_filename.startswith("<"):
                sources.add(code)
        versions = runtime_versions(device)
        settings = code_settings(options)
        if small:
            settings["small"] = [list(each) for each in small]
        key = CacheKey.of(settings, sources, versions=versions)
        return cls(cache.open(key))

    @property
    def found(self) -> bool:
        """Whether there is a complete entry; single pieces of it may still be missing."""
        return self._entry.found

    def load(self, name: str, returns: int | None) -> CompiledPiece | None:
        """A piece that was compiled before; None, with a warning, where it cannot be used."""
        artifact = self._entry.load(name)
        if artifact is None:
            return None
        try:
            # A copy of what was checked: what lies in the cache may be another by now.
            path = artifact.write(Path(new_directory()) / "kept")
            place = new_directory()
        except OSError as error:
            # The piece is as good as before.
            warn(f"compiled code is not loaded, as nothing can be unpacked for it: {error}")
            return None
        try:
            return CompiledPiece.load(path, returns, place)
        except Exception as error:
            # Whatever a compiler says of what it wrote, it is compiled again.
            self._entry.reject(name, f"{type(error).__name__}: {error}")
            return None

    def store(self, name: str, compiled: CompiledPiece) -> None:
        """Keep a piece; one that the compiler cannot save is compiled again at every start."""
        save_format: Any = self._entry.save_format
        try:
            self._entry.store(name, lambda path: compiled.save(path, save_format))
        except Exception as error:
            first = str(error).partition("\n")[0]
            warnings.warn(
                f"a compiled piece cannot be kept in the compile cache: {first}", stacklevel=2
            )

    def finish(self, texts: Mapping[str, str]) -> None:
        """Show others what was stored, and write `texts` by file name."""
        for name, text in texts.items():
            self._entry.write_text(name, text)
        self._entry.complete()

    def discard(self) -> None:
        """Forget what was stored: compiling failed half-way."""
        self._entry.discard()


def _rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0"))
