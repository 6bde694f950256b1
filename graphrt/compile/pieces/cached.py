"""Compiled pieces that are kept on disk."""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from graphrt.compile.backend.inductor import CompiledPiece
from graphrt.compile.backend.process import new_directory
from graphrt.compile.cache.entry import CacheEntry
from graphrt.compile.cache.key.parts import Compilation
from graphrt.compile.cache.store import TEXT_SUFFIX, unpack, warn
from graphrt.core.base.texts import error_line


class CachedPieces:
    """The pieces of one module in the compile cache; the name of a piece is a hash of its graph."""

    def __init__(self, entry: CacheEntry) -> None:
        self.entry = entry
        self.tag = uuid.uuid4().hex
        """Part of the keys in the compiler's own caches, so that these hit nothing older: they know
        less about called functions, and a hit does not tell for which sizes the code is right."""

    @classmethod
    def open(cls, compilation: Compilation) -> CachedPieces:
        """The entry for a compilation. It keeps nothing, with a warning, if a dependency of the
        code cannot be read."""
        options, key = compilation.options, compilation.key()
        unknown = compilation.values.unknown
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            why = "what it depends on cannot be read"
            warn(f"compiled code is not kept, as {why}: {unknown[0]}{more}")
        return cls(
            CacheEntry(
                key,
                options.cache_dir,
                rank=_rank(),
                save_format=options.save_format,
                enabled=not unknown,
            )
        )

    @property
    def had_pieces(self) -> bool:
        """Whether pieces were kept before; single ones may still be missing."""
        return self.entry.had_pieces

    def load(self, name: str, returns: int | None) -> CompiledPiece | None:
        """A piece that was compiled before; None, with a warning, where it cannot be used."""
        archive = self.entry.load(name)
        if archive is None:
            return None
        try:
            # Unpacked from the bytes that were checked: the file may be another one by now.
            path, own_caches = Path(new_directory()) / "kept", new_directory()
            unpack(archive, path)
        except OSError as error:
            # The cached piece itself is not at fault, and stays.
            warn(f"compiled code is not loaded, as nothing can be unpacked for it: {error}")
            return None
        try:
            return CompiledPiece.load(path, returns, own_caches)
        except Exception as error:
            # A compiler may raise anything about its own file: the piece is compiled again.
            self.entry.reject(name, error_line(error))
            return None

    def store(self, name: str, compiled: CompiledPiece, graph: Sequence[str]) -> None:
        """Keep a piece, and lines about its graph; a piece that the compiler cannot save is
        compiled again at every start."""
        self.entry.write_text(name + TEXT_SUFFIX, "\n".join(graph) + "\n")
        try:
            self.entry.store(name, lambda path: compiled.save(path, self.entry.save_format))
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
