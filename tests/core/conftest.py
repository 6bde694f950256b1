"""Fixtures that several tests of the core share."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import pytest

from tests.core.native_build import build


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The extension, built as an installation that asks for it builds it."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if shutil.which(compiler) is None or not header.exists():
        pytest.skip(f"needs a C compiler ({compiler}) and Python's headers ({header})")
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("native")
    # Beside what it is asked for: see `make test-sanitized`.
    flags = f"{os.environ.get('CFLAGS', '')} -Wall -Werror"
    (library,) = build(folder, {"GRAPHRT_NATIVE": "1", "CFLAGS": flags})
    return library
