"""The tape of a capture: what is recorded, how it is made cheap, and the code that replays it."""

from graphrt.cpu.tape.lowering import Call, Lowered, replay_guard
from graphrt.cpu.tape.operators import Operator, operator_of
from graphrt.cpu.tape.program import TaskCall, assemble
from graphrt.cpu.tape.recorder import Step, Tape
from graphrt.cpu.tape.refusals import HostReads
from graphrt.cpu.tape.tensors import tensors_in

__all__ = [
    "Call",
    "HostReads",
    "Lowered",
    "Operator",
    "Step",
    "Tape",
    "TaskCall",
    "assemble",
    "operator_of",
    "replay_guard",
    "tensors_in",
]
