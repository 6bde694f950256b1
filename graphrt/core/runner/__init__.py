"""`GraphRunner`: all of it for one forward."""

from graphrt.core.runner._dropped import DroppedGraph
from graphrt.core.runner._meanwhile import SlowStep, StepsMeanwhile
from graphrt.core.runner._rounds import CaptureProgress
from graphrt.core.runner.checks import TrialRecord
from graphrt.core.runner.command_line import runner_settings
from graphrt.core.runner.host import AroundCapture, Bind, Example, Host, MakeExample, Phase
from graphrt.core.runner.report import RunnerReport, TrustReport
from graphrt.core.runner.runner import GraphRunner
from graphrt.core.runner.session import GraphRecord, Progress

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
    "SlowStep",
    "StepsMeanwhile",
    "TrialRecord",
    "TrustReport",
    "runner_settings",
]
