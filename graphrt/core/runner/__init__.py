"""`GraphRunner`: all of it for one forward."""

from graphrt.core.runner.host import Bind, Host, Phase
from graphrt.core.runner.report import RunnerReport
from graphrt.core.runner.runner import GraphRunner
from graphrt.core.runner.settings import runner_settings

__all__ = [
    "Bind",
    "GraphRunner",
    "Host",
    "Phase",
    "RunnerReport",
    "runner_settings",
]
