"""The version of the device contract, and what a platform may be capable of."""

from __future__ import annotations

import enum

from graphrt.core.base import ContractVersionError

CONTRACT_VERSION = 1
"""Of the device contract. It grows when a platform that was right before may not be any longer."""

OLDEST_CONTRACT = 1
"""The oldest version whose platforms still work."""


class Capability(enum.Enum):
    """What a platform can do beyond running eagerly. Core asks for these, never for a device."""

    CAPTURE = "capture"
    SHARED_POOL = "shared_pool"
    ALLOCATE_IN_POOL = "allocate_in_pool"
    STREAMS = "streams"
    TASK_UPDATE = "task_update"
    DEFERRED_UPDATE = "deferred_update"
    EXEC_DEDUP = "exec_dedup"
    RANDOM = "random"
    INPUT_RING = "input_ring"
    HOST_POOL = "host_pool"


def check_contract(name: object, version: object) -> None:
    """Raise `ContractVersionError` for a platform of that name that was written for another version
    of the contract."""
    if not isinstance(version, int) or not OLDEST_CONTRACT <= version <= CONTRACT_VERSION:
        newer = isinstance(version, int) and version > CONTRACT_VERSION
        others = "" if OLDEST_CONTRACT == CONTRACT_VERSION else f"{OLDEST_CONTRACT} to "
        raise ContractVersionError(
            f"platform {name!r} was written for another version of the device contract",
            got=f"contract_version = {version!r}",
            expected=f"{others}{CONTRACT_VERSION}, which this graphrt has",
            advice="install a newer graphrt" if newer else "install a newer version of the plugin",
        )
