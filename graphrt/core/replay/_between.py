"""Whether the host is between two steps of a pool, for what may come there and nowhere else."""

from __future__ import annotations

from graphrt.core.base.errors import PoolBusyError
from graphrt.core.base.option_values import shown
from graphrt.core.batch.context import current_context
from graphrt.core.replay.pool import GraphPool


def check_between_steps(pool: GraphPool, what: str) -> None:
    """Raise `PoolBusyError` while a step or a capture is under way in the pool, or a context is
    entered in this thread, whatever has been called in it. A step that waits for its updates, or
    of which some pieces are to come, is under way; it is not ended."""
    under_way = pool.owner or current_context() or pool.entered
    if under_way is not None:
        raise PoolBusyError(
            f"{what} was called while a step, or a capture, is under way",
            got=shown(under_way),
            expected="a call between two steps of the pool, when the last one has its updates",
            advice="call it after the step has returned, from the thread that steps",
        )
