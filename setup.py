"""What pyproject.toml cannot say: the C files of native/ are compiled where there is a compiler.

They make a step cheaper on the host; without them the same is done in Python. A failure to build is
a line of the log, an error only with GRAPHRT_NATIVE=1; GRAPHRT_NATIVE=0 builds nothing.
"""

import os
import runpy
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

_ASKED = os.environ.get("GRAPHRT_NATIVE", "")
_FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def _native() -> Extension:
    package = Path(__file__).resolve().parent / "graphrt"
    known = runpy.run_path(str(package / "core" / "base" / "native_sources.py"))
    return Extension(
        "graphrt.core.base._native",
        [f"native/{name}.c" for name in ("glances", "module", "path", "replay", "slots", "watch")],
        depends=["native/native.h"],
        define_macros=[
            (name, f'"{value}"') for name, value in known["fingerprints"](package).items()
        ],
        optional=_ASKED != "1",
    )


if _FREE_THREADED:
    print("graphrt: free-threaded builds of Python run every step in Python")
setup(ext_modules=[] if _FREE_THREADED or _ASKED == "0" else [_native()])
