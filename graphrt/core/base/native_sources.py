"""What the compiled step was made from. `setup.py` runs this file: it imports nothing of graphrt.

C reads objects of Python where they lie, and does what modules of graphrt do. So a build belongs to
the C files and to those modules as they were then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

TWINS = (
    "batch/descriptor.py",
    "capture/sealing.py",
    "device/_input_ring.py",
    "dispatch/dispatcher.py",
    "dispatch/reasons.py",
    "inputs/buffers.py",
    "inputs/layout.py",
    "inputs/transfer/alike.py",
    "inputs/transfer/ring.py",
    "replay/_turn.py",
    "replay/entry.py",
    "replay/handout.py",
    "replay/pool.py",
    "runner/checks.py",
    "runner/engine.py",
    "runner/executor.py",
    "runner/prepared.py",
)
"""The modules of core whose objects C reads, or whose work it does."""


def fingerprints(package: Path) -> dict[str, str]:
    """By name, the hash of the modules of a `graphrt` folder, and of the C files beside it; without
    these, as in an installed wheel, there is no hash of them."""
    found = {"TWINS": _hash(package / "core" / name for name in TWINS)}
    c_files = sorted((package.parent / "native").glob("*.[ch]"))
    return found | ({"SOURCES": _hash(c_files)} if c_files else {})


def _hash(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()
