"""Whose code is it, a library's or a user's? A walk reads code of users alone.

The file of a module decides. A user's package may be named `code`, `queue` or `profile`, as a
module of the standard library is. Of libraries only objects that a forward holds are looked into,
for their data, unless `is_machinery` says that they are no state of a model.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from typing import Any

from graphrt.core.base.library_files import is_python_file
from graphrt.trust.places.slots import module_globals, module_of, name_of, namespace_of

_WITH_MODELS = (
    *("demo", "testing", "attention", "hosts.transformers"),
    *("hosts.vllm.wrapper", "hosts.vllm.breakable"),
)
"""Parts of graphrt that hold models; the others are the runtime, and no user's forward."""
_WITHOUT_MODELS = tuple(
    f"hosts.transformers.{name}" for name in ("seam", "graphs", "encoders", "batches")
)
"""Modules of these parts that are runtime all the same. Otherwise a walk goes from a model through
its graphs to the KV cache of the sequence under way. The next sequence has another cache, which
would count as a moved tensor."""

_CONTEXTS_OF_STEPS = "vllm.forward_context", "sglang.srt.model_executor.forward_context"
"""Modules of engines whose context of a step, with its metadata, is another object at each step. A
walk that went on would come by SGLang's to all that its scheduler has: 0.3 s at each step."""

_PACKAGES = frozenset({
    "torch_npu", "torchvision", "torchaudio", "numpy", "triton",
    "pluggy", "typing_extensions", "pytest", "_pytest",
})  # fmt: skip
"""Installed packages that are libraries. Of a user's own package of such a name it is not true."""

_NO_STATE = tuple(f"{name}." for name in (
    # Running and watching code.
    "_thread", "asyncio", "bdb", "cProfile", "cmd", "code", "codeop", "concurrent", "doctest",
    "importlib", "inspect", "logging", "multiprocessing", "pdb", "pluggy", "profile", "pytest",
    "_pytest", "sched", "threading", "timeit", "trace", "traceback", "tracemalloc", "triton",
    "typing", "typing_extensions", "unittest", "warnings", "zipimport",
    # Files, sockets, queues, processes: their state is in the system. To put attributes of such an
    # object back, as a trial does, would part it from its file.
    "_io", "_pyio", "bz2", "codecs", "curses", "dbm", "fileinput", "ftplib", "gzip", "http",
    "imaplib", "lzma", "mailbox", "mmap", "nntplib", "poplib", "queue", "selectors", "shelve",
    "smtplib", "socket", "socketserver", "sqlite3", "ssl", "subprocess", "tarfile", "telnetlib",
    "tempfile", "tkinter", "urllib", "wsgiref", "xmlrpc", "zipfile",
    # Of torch and its devices: streams, graphs, processes, profilers and modes.
    "torch.accelerator", "torch.amp.autocast_mode", "torch.autograd", "torch.compiler",
    "torch.cpu", "torch.cuda", "torch.distributed", "torch.export", "torch.fx", "torch.futures",
    "torch.jit", "torch.library", "torch.mps", "torch.mtia", "torch.multiprocessing", "torch.onnx",
    "torch.overrides", "torch.package", "torch.profiler", "torch.testing", "torch.utils.benchmark",
    "torch.utils.cpp_extension", "torch.utils.hooks", "torch.utils.tensorboard", "torch.xpu",
    "torch_npu",
))  # fmt: skip


def is_library(module: str, held: dict[str, Any] | None = None) -> bool:
    """Whether a module of this dotted name holds no code of a user.

    `held` are its globals where they are at hand. Without them `sys.modules` is asked for the root
    package.
    """
    root, _, rest = module.partition(".")
    if root == "graphrt":
        return rest in _WITHOUT_MODELS or not rest.startswith(_WITH_MODELS)
    if root == "torch" or module in _CONTEXTS_OF_STEPS:
        return True
    is_python = root in sys.stdlib_module_names
    if not is_python and root not in _PACKAGES:
        return False
    if held is None:
        home = sys.modules.get(root)
        held = module_globals(home) if issubclass(type(home), types.ModuleType) else {}
    file = held.get("__file__")
    if type(file) is not str:
        # Built into Python. A module that a user makes without a file has no such origin.
        origin = getattr(held.get("__spec__"), "origin", None)
        return is_python and origin in ("built-in", "frozen")
    return is_python_file(file) if is_python else f"-packages{os.sep}" in file


def is_library_class(of: type) -> bool:
    """Whether a class is a library's."""
    module = module_of(of)
    if not is_library(module):
        return False
    if module.partition(".")[0] not in sys.stdlib_module_names:
        return True
    home = sys.modules.get(module)
    if issubclass(type(home), types.ModuleType) and module_globals(home).get(name_of(of)) is of:
        return True
    # A user's file `code.py` may have been loaded beside the `code` of the standard library.
    functions = [f for f in namespace_of(of).values() if type(f) is types.FunctionType]
    return all(is_library(module, each.__globals__) for each in functions)


@functools.lru_cache(maxsize=4096)
def is_machinery(module: str) -> bool:
    """Whether objects of a library's module are no state of a model: streams, files, loggers. What
    changes in them at each step would cost trials."""
    # Private packages of torch are its compiler, its operators, its modes and what is in C; others
    # in public ones, such as `torch.utils._pytree`, hold data.
    return f"{module}.".startswith(("graphrt.", "torch._", *_NO_STATE))
