"""The versions of diffusers that are known, and the names that graphrt reads in any version.

The seam is `forward` on the instance of a denoiser, which is torch's. Of diffusers itself only the
mark of its hooks is read: without it a module with hooks would be replayed without them. So another
version is served as long as the mark is there.
"""

from __future__ import annotations

import importlib
import sys
from types import CodeType
from typing import Any

from graphrt.errors import UnsupportedHostError
from graphrt.hosts.diffusers.hooks import REGISTRY

KNOWN = ("0.42",)
"""With which the tests of images were run."""

_HOOKS = "diffusers.hooks.hooks"
_USES = {"check_if_exists_or_initialize": REGISTRY, "register_hook": "hooks"}
"""Method of `HookRegistry` -> a name that its code must use."""


def check_names() -> None:
    """Raise `UnsupportedHostError` if diffusers is there, and marks hooks in another way."""
    diffusers = sys.modules.get("diffusers")
    if diffusers is None:
        return
    try:
        registry: Any = importlib.import_module(_HOOKS).HookRegistry
        missing = [
            f"{name!r} in {_HOOKS}.HookRegistry.{method}"
            for method, name in _USES.items()
            if name not in _named_in(getattr(registry, method).__code__)
        ]
    except (ImportError, AttributeError) as error:
        missing = [str(error)]
    if missing:
        raise UnsupportedHostError(
            f"diffusers {getattr(diffusers, '__version__', '?')} is not as graphrt knows it",
            got="no " + ", no ".join(missing),
            expected=f"the hooks of diffusers {', '.join(f'{known}.*' for known in KNOWN)}",
            advice="install one of these, or leave with_graphs() out",
        )


def _named_in(code: CodeType) -> set[object]:
    return {*code.co_names, *code.co_consts}
