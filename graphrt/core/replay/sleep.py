"""`Asleep`: what a pool is while its host has taken the pages of its memory, and the addresses stay
(cuMem, torch_memory_saver).

What must keep its contents over a sleep:

1. Tensors in the pool that somebody holds, whatever they are: static outputs, constants, a tensor
   that the forward keeps in Python, a runner's buffers if it was made in the pool. `save` copies
   the blocks that are in use to the host, `restore` copies them back.
2. Results of eager parts between two pieces (bridges) and the copies of lifted constants are
   written in each step before a graph reads them. A block that is in use is copied all the same.
3. A runner's buffers, its ring, the page-locked source of a constant and the state of generators
   are outside of the pool, as a capture makes none of them.

Nothing else is saved: no intermediate tensor, and no output that a step has handed out, which is
unreadable from then on.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from graphrt.core.base.errors import PoolAsleepError
from graphrt.core.base.thread_mode import unseen
from graphrt.core.device.platform import Platform


class Asleep:
    """Owns a pool from `GraphPool.suspend` to `resume`, so that nobody else has a turn; holds the
    copies of what is in use in its memory."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        # Each memory of the pool, and what the platform has saved of it.
        self._saved: list[tuple[Any, Any]] = []

    def save(self, memories: Iterable[Any]) -> None:
        """Copy what is in use in the `memories`, when all work on the device is over."""
        self._platform.synchronize()
        for memory in memories:
            self._saved.append((memory, unseen(partial(self._platform.save, memory))))

    def restore(self) -> bool:
        """Copy it back; False if some memory is not at its addresses. May be called again."""
        back = [unseen(partial(self._platform.restore, *each)) for each in self._saved]
        # Steps on other streams read it.
        self._platform.synchronize()
        return all(back)

    def refusal(self, pool: object) -> PoolAsleepError:
        """The error for whoever wants the pool: see `GraphPool.busy_error`."""
        return PoolAsleepError(
            "the pool's memory sleeps: no step, capture or change of its graphs can be made",
            expected="an awake pool",
            advice="give the memory back, as by CuMemAllocator.wake_up(), then GraphPool.resume(); "
            "GraphPool.close() and GraphRunner.close() need neither",
        )
