"""What pyproject.toml cannot say: the C part, and the README as a package index shows it.

The C files of native/ make a step cheaper on the host; without them the same is done in Python. A
failure to build is a line of the log, an error only with GRAPHRT_NATIVE=1; GRAPHRT_NATIVE=0 builds
nothing. An index has no tree, so the README's links into it lead to the source there.
"""

import os
import re
import runpy
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

_ASKED = os.environ.get("GRAPHRT_NATIVE", "")
_FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
_ROOT = Path(__file__).resolve().parent


def _readme() -> str:
    project = (_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (source,) = re.findall('^Source = "(.+)"$', project, re.MULTILINE)
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?!https?:|#)", f"]({source}/blob/main/", text)


def _native() -> Extension:
    package = _ROOT / "graphrt"
    known = runpy.run_path(str(package / "core" / "base" / "native_sources.py"))
    return Extension(
        "graphrt.core.base._native",
        [f"native/{name}.c" for name in ("glances", "module", "path", "replay", "slots", "watch")],
        depends=[
            "native/native.h",
            *(f"graphrt/{name}" for name in (*known["TWINS"], *known["TRUST"])),
        ],
        # A package may lack graphrt.trust.
        define_macros=[
            (name, f'"{value}"')
            for name, value in {"TRUST": "", **known["fingerprints"](package)}.items()
        ],
        # Python's own flags may ask for debug symbols, which are most of the file.
        extra_compile_args=["-g0"] if os.name == "posix" else [],
        optional=_ASKED != "1",
    )


if _FREE_THREADED:
    print("graphrt: free-threaded builds of Python run every step in Python")
setup(
    long_description=_readme(),
    long_description_content_type="text/markdown",
    ext_modules=[] if _FREE_THREADED or _ASKED == "0" else [_native()],
)
