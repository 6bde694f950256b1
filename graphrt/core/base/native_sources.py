"""Hashes of the sources of the C part, by which a build of other sources is known and left out.
`setup.py` runs this file: it imports nothing of graphrt.

C reads slots of Python objects by their offset, and does the work of some modules. So a build
belongs to the C files and to the code of those modules as they were then.
"""

from __future__ import annotations

import ast
import hashlib
import os
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
    "cuda/ring/format.py",
    "cuda/ring/moves.py",
    "cuda/ring/slots.py",
    "cuda/ring/transport.py",
    "cuda/ring/writers.py",
)
"""The modules whose objects C reads, or whose work it does."""


TRUST = (
    "trust/glances.py",
    "trust/host_watch.py",
)
"""Those of `graphrt.trust`, which a program without checks may lack."""


def fingerprints(package: Path) -> dict[str, str]:
    """name -> hash: TWINS and TRUST of the modules in a `graphrt` folder, SOURCES of the C files
    beside it, which an installed wheel has not. Comments and docstrings of Python do not count."""
    c_files = _c_files(package)
    digests = {"TWINS": _hash(_code(package / name) for name in TWINS)}
    if (package / "trust").is_dir():
        digests["TRUST"] = _hash(_code(package / name) for name in TRUST)
    return digests | ({"SOURCES": _hash(each.read_bytes() for each in c_files)} if c_files else {})


def newest(package: Path) -> float:
    """When the last of these files was changed; 0 in a wheel, which has no C files."""
    if not _c_files(package):
        return 0.0
    names = [*TWINS, *(TRUST if (package / "trust").is_dir() else ())]
    files = [*(package / name for name in names), *_c_files(package)]
    return max(map(os.path.getmtime, files))


def _c_files(package: Path) -> list[Path]:
    return sorted((package.parent / "native").glob("*.[ch]"))


def _code(file: Path) -> bytes:
    """The syntax tree of a module without its docstrings."""
    tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [each for each in node.body if not _is_text(each)]
    return ast.dump(tree).encode()


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _hash(texts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text)
    return digest.hexdigest()
