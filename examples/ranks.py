"""Data-parallel ranks with batches of their own, whose layers sum over ranks: one graph for all.

torchrun --nproc-per-node 2 examples/ranks.py prints for each rank how its steps ran. It runs on the
CPU over gloo; with GPUs the model's group would be NCCL, and the votes stay on gloo.
"""

import random

import torch
import torch.distributed as dist

from graphrt import Batch, GraphRunner, Host, InputSpec, eager_break
from graphrt.ranks import Agreement

HIDDEN, STEPS = 64, 200


@eager_break
def sum_over_ranks(hidden):
    dist.all_reduce(hidden)
    return hidden


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    weight = torch.randn(HIDDEN, HIDDEN) / HIDDEN

    def forward(hidden):
        return torch.tanh(sum_over_ranks(hidden @ weight))

    inputs = {"hidden": InputSpec(torch.float32, ("tokens", HIDDEN))}
    sizes, loads = [1, 2, 4, 8, 16], random.Random(dist.get_rank())
    with (
        Agreement(timeout_s=30) as agreement,
        GraphRunner(
            forward,
            mode="PIECEWISE",
            sizes=sizes,
            inputs=inputs,
            outputs=("tokens", HIDDEN),
            host=Host(ranks=agreement),
        ) as runner,
    ):
        runner.capture()
        for _ in range(STEPS):
            tokens = loads.randint(0, 16)
            if tokens == 0:
                agreement.idle(runner)
            else:
                runner(Batch(tokens, tokens), hidden=torch.randn(tokens, HIDDEN))
        reasons = {reason.name: count for reason, count in runner.report().reasons.items() if count}
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, reasons)
    if dist.get_rank() == 0:
        for rank, counts in enumerate(everybody):
            print(f"rank {rank}: {counts}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
