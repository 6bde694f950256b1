"""`GraphRunner`: all of it for one forward."""

from graphrt.core.runner.capture_session import Progress
from graphrt.core.runner.checks import TrialRecord
from graphrt.core.runner.command_line import runner_settings
from graphrt.core.runner.graph_table import DroppedGraph, GraphRecord
from graphrt.core.runner.host import AroundCapture, Bind, Example, Host, MakeExample, Phase
from graphrt.core.runner.report import RunnerReport, TrustReport
from graphrt.core.runner.runner import GraphRunner
from graphrt.core.runner.scheduler import CaptureProgress

__all__ = [
    "AroundCapture",
    "Bind",
    "CaptureProgress",
    "DroppedGraph",
    "Example",
    "GraphRecord",
    "GraphRunner",
    "Host",
    "MakeExample",
    "Phase",
    "Progress",
    "RunnerReport",
    "TrialRecord",
    "TrustReport",
    "runner_settings",
]
