"""The settings of torch's compiler, as the key of compiled code has them."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FunctionType

from graphrt.compile.cache.key.sources import code_digest
from graphrt.compile.private_torch.inductor import custom_passes, portable_settings

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def compiler_settings() -> dict[str, object]:
    """Every setting of Dynamo, AOTAutograd and Inductor that changes code, custom passes too.

    Raises `MissingTorchNameError` where this torch cannot tell them.
    """
    found = {name: _plain(value) for name, value in portable_settings().items()}
    for name, value in custom_passes().items():
        found[f"inductor.{name}"] = _pass_identity(value)
    return found


def _plain(value: object) -> object:
    """A compiler's setting without paths or addresses of this machine."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return Path(value).name if os.path.isabs(value) else value
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_plain(each)) for each in value)
    return _ADDRESS.sub("", repr(value))


def _pass_identity(value: object) -> object:
    """A pass says by `uuid` what it is; of another one its bytecode does."""
    if isinstance(value, (list, tuple)):
        return [_pass_identity(each) for each in value]
    uuid_of: Callable[[], object] | None = getattr(value, "uuid", None)
    if uuid_of is not None:
        identity = uuid_of()
        # None is torch's "do not cache me": such a key is never met again.
        return uuid.uuid4().hex if identity is None else _plain_bytes(identity)
    return sorted(f"{each.__qualname__} {code_digest(each.__code__)}" for each in _functions(value))


def _plain_bytes(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else _plain(value)


def _functions(value: object) -> Iterable[FunctionType]:
    if isinstance(value, FunctionType):
        return [value]
    return [each for each in vars(type(value)).values() if isinstance(each, FunctionType)]
