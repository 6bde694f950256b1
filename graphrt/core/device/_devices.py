"""Which of several devices of one kind is meant, and what may not happen on two at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.option_values import shown
from graphrt.core.device.platform import Platform

# Process-wide because devices are: two captures on one device at the same time see each other's
# work, whoever they belong to.
_locks: dict[tuple[str, int | None], threading.RLock] = {}
_making = threading.Lock()


def capture_lock(device: torch.device) -> threading.RLock:
    """The lock of a device that is held by the thread that captures on it."""
    key = device.type, device.index
    with _making:
        if key not in _locks:
            _locks[key] = threading.RLock()
        return _locks[key]


@contextmanager
def no_other_capture(device: torch.device) -> Iterator[bool]:
    """Keep other devices of this kind from being captured on, if none is: else it yields False.

    The caller holds the lock of `device`. It does not wait: who captures there may wait for it.
    """
    with _making:
        others = [lock for key, lock in _locks.items() if key[0] == device.type]
    with ExitStack() as taken:
        yield all(lock.acquire(blocking=False) and taken.callback(lock.release) for lock in others)


def device_of(platform: Platform, device: torch.device | str | int | None) -> torch.device:
    """The device that is meant, with its index where there may be several: None is the current one.

    Raises `InvalidOptionError` for one of another kind, and for an index that there is not.
    """
    kind = platform.device_type
    asked = asked_device(kind, device)
    current, count = platform.current_device(), platform.device_count()
    index = current or 0 if asked.index is None else asked.index
    if asked.type != kind:
        expected = f"a device of type {kind!r}, which platform {platform.name!r} is for"
        raise _no_device("the device is of another kind than the platform's", asked, expected)
    if not 0 <= index < count:
        raise _no_device("there is no device of that index", asked, f"an index below {count}")
    return torch.device(kind) if current is None else torch.device(kind, index)


def asked_device(kind: str, device: Any) -> torch.device:
    """The device that an argument names, or one of `kind`; raises `InvalidOptionError` where it
    names none."""
    try:
        if isinstance(device, int | None):
            return torch.device(kind) if device is None else torch.device(kind, device)
        return torch.device(device)
    # An index that is none, a name that is none.
    except (RuntimeError, ValueError, OverflowError, TypeError) as error:
        expected = f"a torch.device, its name or an index of a device of type {kind!r}"
        raise _no_device(
            "the argument 'device' names no device", shown(device), expected
        ) from error


def _no_device(what: str, got: object, expected: str) -> InvalidOptionError:
    advice = "leave device= out for the current one, or name the platform of that device"
    return InvalidOptionError(what, got=got, expected=expected, advice=advice)
