"""Data-parallel ranks as actors of Ray: a vote on the graph of each step, idle ranks in between.

python3 examples/ray_ranks.py starts Ray on this machine, with two ranks on the CPU over gloo. On a
cluster `ray.init(address="auto")` spreads the actors over its machines; with GPUs each actor asks
for one (`num_gpus=1`), and the model's own group is NCCL.
"""

import os
import random

import ray
import torch
import torch.distributed as dist

from graphrt import Batch, GraphRunner, Host, InputSpec, eager_break
from graphrt.ranks import Agreement

RANKS, HIDDEN, STEPS, SIZES = 2, 64, 100, [1, 2, 4, 8, 16]


def make_forward():
    """Made by each actor itself: Ray copies the functions of this file, and an eager break holds
    what cannot be copied."""
    torch.manual_seed(0)
    weight = torch.randn(HIDDEN, HIDDEN) / HIDDEN

    @eager_break
    def sum_over_ranks(hidden):
        dist.all_reduce(hidden)
        return hidden

    return lambda hidden: torch.tanh(sum_over_ranks(hidden @ weight))


@ray.remote(num_cpus=1)
class Rank:
    def listen(self):
        """Make the store of rank 0, by which ranks find one another; where it is."""
        # Heartbeats are kept at this address too.
        host = os.environ["MASTER_ADDR"] = ray.util.get_node_ip_address()
        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self.store.port

    def start(self, rank, host, port):
        store = self.store if rank == 0 else dist.TCPStore(host, port)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        self.agreement = Agreement(timeout_s=60)
        self.runner = GraphRunner(
            make_forward(),
            mode="PIECEWISE",
            sizes=SIZES,
            inputs={"hidden": InputSpec(torch.float32, ("tokens", HIDDEN))},
            outputs=("tokens", HIDDEN),
            host=Host(ranks=self.agreement),
            platform="cpu",
        )
        self.runner.capture()

    def step(self, tokens):
        """The graph that a step of so many tokens has run by, which is the same on all ranks."""
        if tokens == 0:
            return str(self.agreement.idle(self.runner))
        self.runner(Batch(tokens, tokens), hidden=torch.randn(tokens, HIDDEN))
        return str(self.runner.last_dispatch)

    def stop(self):
        self.runner.close()
        self.agreement.close()
        dist.destroy_process_group()


def main():
    ray.init(num_cpus=RANKS, include_dashboard=False)
    ranks = [Rank.remote() for _ in range(RANKS)]
    host, port = ray.get(ranks[0].listen.remote())
    ray.get([each.start.remote(rank, host, port) for rank, each in enumerate(ranks)])
    loads, same = random.Random(0), 0
    for _ in range(STEPS):
        graphs = ray.get([each.step.remote(loads.randint(0, SIZES[-1])) for each in ranks])
        same += len(set(graphs)) == 1
    ray.get([each.stop.remote() for each in ranks])
    ray.shutdown()
    print(f"{same} of {STEPS} steps: one graph on all {RANKS} ranks")


if __name__ == "__main__":
    main()
