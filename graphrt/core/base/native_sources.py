"""Hashes of the sources of the C part, by which a build of other sources is known and left out.
`setup.py` runs this file: it imports nothing of graphrt.

C reads slots of Python objects by their offset, and does the work of some modules. So a build
belongs to the C files and to those modules as they were then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

TWINS = (
    "core/batch/descriptor.py",
    "core/capture/options.py",
    "core/dispatch/dispatcher.py",
    "core/dispatch/reasons.py",
    "core/inputs/buffers.py",
    "core/inputs/layout.py",
    "core/inputs/transport.py",
    "core/replay/entry.py",
    "core/replay/handout.py",
    "core/replay/pool.py",
    "core/runner/contract.py",
    "core/runner/engine.py",
    "core/runner/executor.py",
    "core/runner/graph_table.py",
    "trust/host_watch.py",
    "trust/places/slots.py",
    "trust/reads.py",
    "cuda/ring/format.py",
    "cuda/ring/moves.py",
    "cuda/ring/slots.py",
    "cuda/ring/transport.py",
    "cuda/ring/writers.py",
)
"""The modules whose objects C reads, or whose work it does."""


def fingerprints(package: Path) -> dict[str, str]:
    """name -> hash: TWINS of the modules in a `graphrt` folder, SOURCES of the C files beside it,
    which an installed wheel has not."""
    digests = {"TWINS": _hash(package / name for name in TWINS)}
    c_files = sorted((package.parent / "native").glob("*.[ch]"))
    return digests | ({"SOURCES": _hash(c_files)} if c_files else {})


def _hash(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()
