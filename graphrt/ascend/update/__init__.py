"""The update of tasks around a replay, in flight."""

from graphrt.ascend.update.brackets import TaskHandle
from graphrt.ascend.update.deferred import UpdateWindow
from graphrt.ascend.update.streams import is_update_stream, leave_stream, no_update_under_way
from graphrt.ascend.update.tasks import Tasks

__all__ = [
    "TaskHandle",
    "Tasks",
    "UpdateWindow",
    "is_update_stream",
    "leave_stream",
    "no_update_under_way",
]
