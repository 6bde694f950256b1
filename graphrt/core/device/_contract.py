"""The version of the device contract, and what a platform may be capable of."""

from __future__ import annotations

import enum
from typing import Any

from graphrt.core.base.errors import ContractVersionError
from graphrt.core.base.homes import public

CONTRACT_VERSION = 2
"""Of the device contract. It grows when a platform that was right before may not be any longer. 2
has no input ring and shares no executables; a platform of 1 that had neither still works."""

OLDEST_CONTRACT = 1
"""The oldest version whose platforms still work."""


@public("graphrt.platforms")
class Capability(enum.Enum):
    """What a platform can do beyond running eagerly, and the methods that it supplies for that.
    Core asks for these, never for a device."""

    CAPTURE = "capture"
    """Work can be captured as graphs and replayed."""
    SHARED_POOL = "shared_pool"
    """Graphs in one memory use each other's blocks: `owns` and `weak_ref` tell and release them."""
    ALLOCATE_IN_POOL = "allocate_in_pool"
    """`allocate_in`."""
    STREAMS = "streams"
    """Work is issued on streams: the methods under "Streams"."""
    TASK_UPDATE = "task_update"
    """`task_begin`, `task_end` and `replay_updated`."""
    RANDOM = "random"
    """Random operators of a graph draw new numbers at every replay."""
    HOST_POOL = "host_pool"
    """`adopt_memory` and `memory_handle`."""


def check_contract(platform: Any) -> None:
    """Raise `ContractVersionError` for a platform that was written for another version of the
    contract."""
    version = platform.contract_version
    if version not in range(OLDEST_CONTRACT, CONTRACT_VERSION + 1):
        raise ContractVersionError(
            f"platform {type(platform).__name__} was written for another version of the contract",
            got=f"contract_version = {version!r}",
            expected=f"{OLDEST_CONTRACT} to {CONTRACT_VERSION}, which this graphrt has",
            advice="install the newer version of the plugin, or of graphrt",
        )
