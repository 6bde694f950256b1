"""New host arguments for the tasks of captured graphs, given to their executables."""

from graphrt.cuda.update.ladder import UpdateCounts
from graphrt.cuda.update.tasks import TaskHandle, Tasks

__all__ = ["TaskHandle", "Tasks", "UpdateCounts"]
