"""`GraphRunner`: all of it for one forward."""

from graphrt.core.runner.command_line import runner_settings
from graphrt.core.runner.host import AroundCapture, Bind, Host, Phase
from graphrt.core.runner.report import RunnerReport
from graphrt.core.runner.runner import GraphRunner
from graphrt.core.runner.session import DroppedGraph, GraphRecord, Progress

__all__ = [
    "AroundCapture",
    "Bind",
    "DroppedGraph",
    "GraphRecord",
    "GraphRunner",
    "Host",
    "Phase",
    "Progress",
    "RunnerReport",
    "runner_settings",
]
