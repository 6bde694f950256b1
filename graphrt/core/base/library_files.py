"""Which source files are Python's own."""

from __future__ import annotations

import functools
import os
import sysconfig


@functools.cache
def is_python_file(path: str) -> bool:
    """Whether a file belongs to Python's standard library."""
    if path.startswith("<frozen "):
        return True
    real = os.path.realpath(path)
    return any(
        real.startswith(root) and "-packages" + os.sep not in real.removeprefix(root)
        for root in _python_roots()
    )


@functools.cache
def _python_roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = [paths["stdlib"], paths["platstdlib"]]
    # Python for embedding has its modules in a zip file.
    if os.path.dirname(os.__file__).endswith(".zip"):
        folders.append(os.path.dirname(os.__file__))
    return tuple({os.path.realpath(folder) + os.sep for folder in folders})
