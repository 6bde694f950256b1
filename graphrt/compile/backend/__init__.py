"""Backends: what turns one piece into something to call, and loads what it made before."""

from graphrt.compile.backend.as_operator import AsOperator, TellingWrites
from graphrt.compile.backend.choice import Backend, backend_for
from graphrt.compile.backend.copies import copies_what_it_writes
from graphrt.compile.backend.inductor import CompiledPiece
from graphrt.compile.backend.process import new_directory

__all__ = [
    "AsOperator",
    "Backend",
    "CompiledPiece",
    "TellingWrites",
    "backend_for",
    "copies_what_it_writes",
    "new_directory",
]
