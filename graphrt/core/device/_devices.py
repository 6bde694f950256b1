"""Which of several devices of one kind is meant, and what may not happen on two at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from graphrt.core.base._fork import fork_safe
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.option_values import shown
from graphrt.core.device.platform import Platform

# Process-wide because devices are: two captures on one device at the same time see each other's
# work, whoever they belong to.
_locks: dict[tuple[str, int | None], threading.RLock] = {}
_making = fork_safe(threading.Lock())


def capture_lock(device: torch.device) -> threading.RLock:
    """The lock of a device that is held by the thread that captures on it."""
    key = device.type, device.index
    with _making:
        if key not in _locks:
            _locks[key] = fork_safe(threading.RLock())
        return _locks[key]


@contextmanager
def no_other_capture(device: torch.device) -> Iterator[bool]:
    """Keep other devices of this kind from being captured on, if none is: else it yields False.

    The caller holds the lock of `device`. It does not wait: who captures there may wait for it.
    """
    with _making:
        others = [lock for key, lock in _locks.items() if key[0] == device.type]
    taken: list[threading.RLock] = []
    try:
        for lock in others:
            if not lock.acquire(blocking=False):
                break
            taken.append(lock)
        yield len(taken) == len(others)
    finally:
        for lock in taken:
            lock.release()


def device_of(platform: Platform, device: torch.device | str | int | None) -> torch.device:
    """The device that is meant, with its index where there may be several: None is the current one.

    Raises `InvalidOptionError` for one of another kind, and for an index that there is not.
    """
    kind = platform.device_type
    asked = asked_device(kind, device)
    if asked.type != kind:
        raise InvalidOptionError(
            "the device is of another kind than the platform's",
            got=str(asked),
            expected=f"a device of type {kind!r}, which platform {platform.name!r} is for",
            advice="leave device= out, or name the platform of that device",
        )
    current = platform.current_device()
    count = platform.device_count()
    index = current or 0 if asked.index is None else asked.index
    if not 0 <= index < count:
        raise InvalidOptionError(
            "there is no device of that index",
            got=str(asked),
            expected=f"an index below {count}",
            advice="leave device= out for the current one",
        )
    return torch.device(kind) if current is None else torch.device(kind, index)


def asked_device(kind: str, device: object) -> torch.device:
    """The device that an argument names, or one of `kind`; raises `InvalidOptionError` where it
    names none."""
    if device is None:
        return torch.device(kind)
    cause = None
    try:
        if isinstance(device, int) and not isinstance(device, bool):
            return torch.device(kind, device)
        if isinstance(device, torch.device | str):
            return torch.device(device)
    # An index that is none, a name that is none.
    except (RuntimeError, ValueError, OverflowError) as error:
        cause = error
    raise InvalidOptionError(
        "the argument 'device' names no device",
        got=shown(device),
        expected=f"a torch.device, its name or an index of a device of type {kind!r}",
        advice="leave device= out for the current one",
    ) from cause


def check_memory(platform: Platform, device: torch.device) -> None:
    """Raise `InvalidOptionError` for a device of another kind than the platform's that has no
    memory for tensors: torch was built without it, or there is none."""
    try:
        torch.empty(1, dtype=torch.uint8, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise InvalidOptionError(
            "no tensor can be made on the device",
            got=f"{device}: {' '.join(str(error).split())[:200]}",
            expected=f"a device that this torch has, such as {platform.device_type!r}, where "
            f"platform {platform.name!r} captures",
            advice="leave device= out; `graphrt doctor` says which platforms can be used here",
        ) from error
