"""Real capture and replay on the plain CPU."""

from graphrt.cpu.arena import Arena
from graphrt.cpu.graph import TapeGraph
from graphrt.cpu.platform import CPUGraphWrapper, CpuPlatform
from graphrt.cpu.tape.fusing import LoopsNotCompiledWarning
from graphrt.cpu.task import TaskHandle

__all__ = [
    "Arena",
    "CPUGraphWrapper",
    "CpuPlatform",
    "LoopsNotCompiledWarning",
    "TapeGraph",
    "TaskHandle",
]
