"""Compiled pieces that are kept on disk, and what is written beside them for reading."""

from __future__ import annotations

import os
import uuid
import warnings
from pathlib import Path
from typing import Any

import torch

from graphrt.compile.backend.inductor import CompiledPiece
from graphrt.compile.backend.process import new_directory
from graphrt.compile.cache.disk import CompileCache
from graphrt.compile.cache.entry import CacheEntry
from graphrt.compile.cache.key.parts import Compilation
from graphrt.compile.cache.store import warn


class KeptPieces:
    """The pieces of one module in the compile cache; a name says all that a piece is made of."""

    def __init__(self, entry: CacheEntry) -> None:
        self.entry = entry
        self.tag = uuid.uuid4().hex
        """What the compiler's own caches hold apart, so that nothing is found there: they know less
        of what is called, and what they find does not say what it takes for granted of sizes."""

    @classmethod
    def open(cls, compilation: Compilation) -> KeptPieces:
        """The entry for what is compiled; one that keeps nothing where something that the code may
        depend on cannot be read, which is a warning."""
        options, key = compilation.options, compilation.key()
        unknown = compilation.unknown
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            why = "what it depends on cannot be read"
            warn(f"compiled code is not kept, as {why}: {unknown[0]}{more}")
        return cls(
            CompileCache(
                options.cache_dir,
                rank=_rank(),
                save_format=options.save_format,
                enabled=False if unknown else None,
            ).open(key)
        )

    @property
    def found(self) -> bool:
        """Whether there is a complete entry; single pieces of it may still be missing."""
        return self.entry.found

    def load(self, name: str, returns: int | None) -> CompiledPiece | None:
        """A piece that was compiled before; None, with a warning, where it cannot be used."""
        artifact = self.entry.load(name)
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
            self.entry.reject(name, f"{type(error).__name__}: {error}")
            return None

    def store(self, name: str, compiled: CompiledPiece) -> None:
        """Keep a piece; one that the compiler cannot save is compiled again at every start."""
        save_format: Any = self.entry.save_format
        try:
            self.entry.store(name, lambda path: compiled.save(path, save_format))
        except Exception as error:
            first = str(error).partition("\n")[0]
            warnings.warn(
                f"a compiled piece cannot be kept in the compile cache: {first}", stacklevel=2
            )


def _rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0"))
