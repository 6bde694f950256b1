"""What the compiled step was made from. `setup.py` runs this file: it imports nothing of graphrt.

C reads objects of Python where they lie, and does what modules of graphrt do. So a build belongs to
the C files and to those modules as they were then.
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
    "core/runner/checks.py",
    "core/runner/engine.py",
    "core/runner/executor.py",
    "core/runner/graph_table.py",
    "core/trust/host_watch.py",
    "core/trust/places/slots.py",
    "core/trust/reads.py",
    "cuda/ring/format.py",
    "cuda/ring/moves.py",
    "cuda/ring/slots.py",
    "cuda/ring/transport.py",
    "cuda/ring/writers.py",
)
"""The modules whose objects C reads, or whose work it does."""


def fingerprints(package: Path) -> dict[str, str]:
    """By name, the hash of the modules of a `graphrt` folder, and of the C files beside it; without
    these, as in an installed wheel, there is no hash of them."""
    digests = {"TWINS": _hash(package / name for name in TWINS)}
    c_files = sorted((package.parent / "native").glob("*.[ch]"))
    return digests | ({"SOURCES": _hash(c_files)} if c_files else {})


def _hash(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()
