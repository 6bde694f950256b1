"""What pyproject.toml cannot say: with GRAPHRT_NATIVE=1 the C files of native/ are compiled.

It makes steps whose graphs fetch their inputs cheaper on the host; without it, which is the
default, the same is done in Python.
"""

import os

from setuptools import Extension, setup

_SOURCES = [f"native/{name}.c" for name in ("module", "path", "replay", "slots")]
_NATIVE = Extension("graphrt.core.base._native", _SOURCES, depends=["native/native.h"])

setup(ext_modules=[_NATIVE] if os.environ.get("GRAPHRT_NATIVE") == "1" else [])
