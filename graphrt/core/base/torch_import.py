"""Imports torch, and says what to do where a device extension makes that fail.

`import torch` loads every installed device extension. If one is broken (torch_npu without CANN is),
torch itself cannot be imported, and the error names no way out that a user would look for.
"""

from __future__ import annotations

import re

from graphrt.core.base.errors import TorchImportError

_FAILED = re.compile(r"Failed to load the backend extension: ([\w.-]+)")
_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD=0"


def explain_torch_import(error: BaseException) -> TorchImportError | None:
    """What the failure of `import torch` means; None if no device extension caused it."""
    failed = _FAILED.search(str(error))
    if failed is None:
        return None
    name = failed[1].rstrip(".")
    why = error.__cause__ or error
    reason = str(why).strip().splitlines()[0] if str(why).strip() else type(why).__name__
    return TorchImportError(
        f"torch cannot be imported, because the device extension {name} that it loads is broken",
        got=f"{type(why).__name__}: {reason}",
        expected=f"a working {name}, with the libraries of its device",
        advice=f"`{_SWITCH} graphrt doctor` says what is missing; with {_SWITCH} torch and "
        f"everything but {name} works",
    )


try:
    import torch  # noqa: F401
except RuntimeError as error:
    explained = explain_torch_import(error)
    if explained is None:
        raise
    raise explained from error

# Only now: it imports torch too.
from graphrt.core.base.private_torch import warn_if_untested  # noqa: E402

warn_if_untested()
