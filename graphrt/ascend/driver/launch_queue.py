"""torch_npu's queue of launches, and that it ends with the first error inside of it.

By default (TASK_QUEUE_ENABLE=1) torch_npu hands operators to a thread that launches them. Where one
fails there, the error is raised at some later call, the queue ends, and torch_npu drops without a
word whatever is issued afterwards, on every stream: results are what was in memory before. Only a
new process gets out of it.
"""

from __future__ import annotations

from graphrt.core.base import CaptureError
from graphrt.core.device import error_chain

_ENDED = "The process exits for this inner error"
_first: list[str] = []


def has_queue_ended(error: BaseException | None) -> bool:
    """Whether `error`, or one behind it, says that the queue has ended; remembered if so."""
    for link in error_chain(error) if error is not None else ():
        if isinstance(link, RuntimeError) and _ENDED in str(link):
            _first.append(str(link).splitlines()[0])
            return True
    return False


def check_queue() -> None:
    """Raise `CaptureError` once the queue has ended."""
    if _first:
        raise queue_ended()


def queue_ended() -> CaptureError:
    """That the queue has ended; not a lack of room, after which others could be captured."""
    return CaptureError(
        "an operator failed in torch_npu's queue of launches, which ends at that: nothing that "
        "this process issues gets to the device any more",
        got=_first[0] if _first else None,
        expected="operators that do not fail",
        advice="start the process anew; with TASK_QUEUE_ENABLE=0 torch_npu goes on after the error",
    )
