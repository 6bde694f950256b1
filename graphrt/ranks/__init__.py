"""Ranks that replay the same graph at every step, or get an error.

Data-parallel ranks have batches of their own, and their graphs hold collectives: if one rank
replays another graph, or runs eagerly, all of them hang or compute nonsense. Here every rank votes
on every graph by one small collective a step, and all of them take the best graph that each can
use.

1. `Agreement()` on every rank, after `torch.distributed.init_process_group`.
2. `GraphRunner(..., host=Host(ranks=agreement))`, and `runner.capture()` on all ranks.
3. `runner(batch, **inputs)` at every step of every rank; `agreement.idle(runner)` where a rank has
   nothing.

Every rank makes the same steps in the same order. Ranks of one model (tensor parallel) have equal
batches and need no vote; `agreement.check(runner)` compares their plans and graphs once.
"""

from graphrt._homes import at_home
from graphrt.ranks.agreement import Agreement, PendingVote
from graphrt.ranks.errors import RankLostError, RanksDifferError, RankStoppedError

__all__ = [
    "Agreement",
    "PendingVote",
    "RankLostError",
    "RankStoppedError",
    "RanksDifferError",
]

at_home(__name__, *map(globals().__getitem__, __all__))
