"""What pyproject.toml cannot say: with GRAPHRT_NATIVE=1 one C file is compiled as well.

It makes steps whose graphs fetch their inputs cheaper on the host; without it, which is the
default, the same is done in Python.
"""

import os

from setuptools import Extension, setup

_NATIVE = Extension("graphrt.core.inputs.transfer._native", ["native/slots.c"])

setup(ext_modules=[_NATIVE] if os.environ.get("GRAPHRT_NATIVE") == "1" else [])
