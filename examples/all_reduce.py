"""Two GPUs with half of every layer each: all-reduces inside captured graphs.

python3 examples/all_reduce.py [FULL | PIECEWISE] prints for each rank whether its replays equal the
same padded steps run eagerly, bit for bit, and the microseconds of a step.
"""

import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from graphrt import GraphRunner, InputSpec, eager_break
from graphrt.errors import VerificationError

RANKS, LAYERS, HIDDEN, STEPS = 2, 4, 1024, 50
ROW = "{:<6}{:<11}{:<9}{:>9}{:>9}"


@eager_break
def attention(hidden):
    return torch.softmax(hidden, dim=-1) + hidden


def half_of_the_model(rank):
    torch.manual_seed(rank)
    weights = [torch.randn(HIDDEN, HIDDEN, device="cuda") / HIDDEN for _ in range(LAYERS)]

    def forward(hidden):
        for weight in weights:
            partial = attention(hidden) @ weight
            dist.all_reduce(partial)
            hidden = hidden + torch.tanh(partial)
        return hidden

    return forward


def equal(runner, hidden):
    try:
        runner.verify(hidden=hidden)
    except VerificationError:
        return False
    return True


def microseconds(step, batches):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for hidden in batches:
        step(hidden=hidden)
    torch.cuda.synchronize()
    return round(1e6 * (time.perf_counter() - start) / len(batches))


def run_rank(rank, mode, store):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    forward, rows = half_of_the_model(rank), ("tokens", HIDDEN)
    torch.manual_seed(RANKS)
    batches = [torch.randn(1 + step % 8, HIDDEN, device="cuda") for step in range(STEPS)]
    inputs = {"hidden": InputSpec(torch.float32, rows)}
    # Graphs hold the communicator: the runner is closed before the group is destroyed.
    with GraphRunner(forward, mode=mode, sizes=[1, 2, 4, 8], inputs=inputs, outputs=rows) as runner:
        runner.capture()
        right = [equal(runner, hidden) for hidden in batches]
        took = microseconds(forward, batches), microseconds(runner, batches)
        result = "equal" if all(right) else "differs"
        row = ROW.format(rank, runner.last_dispatch.mode.name, result, *took)
    table = [None] * RANKS
    dist.all_gather_object(table, row)
    dist.destroy_process_group()
    if rank == 0:
        print(ROW.format("rank", "mode", "result", "eager us", "graph us"), *table, sep="\n")
        sys.exit(any("differs" in each for each in table))


if __name__ == "__main__":
    if torch.cuda.device_count() < RANKS:
        sys.exit(f"needs {RANKS} GPUs, found {torch.cuda.device_count()}")
    mode = sys.argv[1] if len(sys.argv) > 1 else "FULL"
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(run_rank, (mode, f"{directory}/store"), nprocs=RANKS)
