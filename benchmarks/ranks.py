"""What a vote of ranks costs a step, and what agreement costs a cluster in padding.

    python3 -m benchmarks.ranks vote [--ranks 2] [--steps 2000] [--json FILE]
    python3 -m benchmarks.ranks cluster [--ranks 8 64 512 4096] [--json FILE]

`vote` starts ranks as processes of this machine over gloo and measures, in microseconds: a gloo
all-reduce of as many bytes by itself; a vote waited for at once; a vote begun before a step of
some work and waited for after it; and vLLM's rule as it is published, one all-reduce of seven
int32 a rank. `cluster` draws batches for many ranks, and compares the tokens that ranks compute:
by the graph itself, as here, and by vLLM's rule (the most tokens of any rank, one mode for all;
query lengths that differ make every rank run the general graph).
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import arguments, environment, finish, show
from graphrt import Batch, BatchDescriptor, GraphDispatcher, GraphMode
from graphrt.ranks import Agreement
from graphrt.ranks.ballot import BYTES, UNUSABLE, Ballot

SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]


def dispatcher_of(query_lens: tuple[int, ...] = (1, 4)) -> GraphDispatcher:
    """A decode graph for each size and query length, and a general one for each size."""
    dispatcher = GraphDispatcher(GraphMode.FULL_AND_PIECEWISE)
    for size in SIZES:
        dispatcher.publish("PIECEWISE", BatchDescriptor(size))
        for query_len in query_lens:
            if size % query_len == 0:
                reqs = size // query_len
                dispatcher.publish("FULL", BatchDescriptor(size, reqs, True, query_len=query_len))
    return dispatcher


def _median_us(step: Callable[[], object], steps: int) -> float:
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


def measure(rank: int, ranks: int, store: str, steps: int, results: Any) -> None:
    """One rank of `vote`, in its process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    votes = torch.zeros(BYTES, dtype=torch.uint8)
    of_vllm = torch.zeros(7 * ranks, dtype=torch.int32)
    matrix = torch.randn(192, 192)

    def work() -> None:
        for _ in range(4):
            torch.mm(matrix, matrix)

    dispatcher, batch = dispatcher_of(), Batch(5, 5, 1)
    with Agreement(timeout_s=60) as agreement:

        def overlapped() -> None:
            vote = agreement.vote(dispatcher, batch)
            work()
            vote.result()

        figures = {
            "all_reduce_us": _median_us(lambda: dist.all_reduce(votes), steps),
            "vllm_us": _median_us(lambda: dist.all_reduce(of_vllm), steps),
            "vote_us": _median_us(lambda: agreement.vote(dispatcher, batch).result(), steps),
            "work_us": _median_us(work, steps),
            "work_beside_a_vote_us": _median_us(overlapped, steps),
        }
    if rank == 0:
        results.put(figures)
    dist.barrier()
    dist.destroy_process_group()


def vote(ranks: int, steps: int) -> dict[str, float]:
    """Microseconds of one step, the median over steps of rank 0."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        started = [
            context.Process(target=measure, args=(rank, ranks, f"{folder}/store", steps, results))
            for rank in range(ranks)
        ]
        for process in started:
            process.start()
        figures: dict[str, float] = results.get()
        for process in started:
            process.join()
    return figures


def cluster(ranks: int, *, steps: int = 60, seed: int = 0) -> dict[str, float]:
    """Of random steps of so many ranks, tokens computed for each live one, and steps without FULL.

    Every rank has its own mean load; one step in eight brings a prompt to one rank in a hundred,
    and one rank in twenty drafts tokens (a query length of 4) while the others decode.
    """
    rng = random.Random(seed)
    dispatcher = dispatcher_of()
    ballot = Ballot(dispatcher)
    means = [min(rng.lognormvariate(3.2, 0.8), 400) for _ in range(ranks)]
    drafts = [rng.random() < 0.05 for _ in range(ranks)]
    live = ours = theirs = 0
    full = theirs_full = 0
    for step in range(steps):
        batches = []
        for mean, draft in zip(means, drafts, strict=True):
            query_len = 4 if draft else 1
            reqs = max(1, min(int(rng.gauss(mean, mean**0.5)), 512 // query_len))
            batch = Batch(reqs * query_len, reqs, query_len)
            if step % 8 == 0 and rng.random() < 0.01:
                batch = Batch(min(reqs + 256, 512), reqs)
            batches.append(batch)
        live += sum(batch.num_tokens for batch in batches)
        usable = map(ballot.usable, set(batches))
        least = [min(column) for column in zip(*usable, strict=True)]
        at = next((at for at, vote in enumerate(least) if vote != UNUSABLE), None)
        graph = None if at is None else ballot.graphs[at]
        rows = 0 if graph is None else graph.descriptor.num_tokens
        ours += rows * ranks if graph else sum(batch.num_tokens for batch in batches)
        full += graph is not None and graph.mode is GraphMode.FULL
        # The most tokens of all; uniform only if all have the same query length.
        lens = {batch.query_len for batch in batches}
        most = Batch(
            max(b.num_tokens for b in batches), None, lens.pop() if len(lens) == 1 else None
        )
        answer = dispatcher.peek(most)
        theirs += answer.descriptor.num_tokens * ranks
        theirs_full += answer.mode is GraphMode.FULL
    return {
        "ranks": ranks,
        "tokens_per_live_token": ours / live,
        "by_vllms_rule": theirs / live,
        "full_steps": full / steps,
        "full_steps_by_vllms_rule": theirs_full / steps,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("what", choices=["vote", "cluster"])
    parser.add_argument("--ranks", type=int, nargs="+", default=None)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    if options.what == "vote":
        for ranks in options.ranks or [2]:
            results[f"{ranks} ranks"] = vote(ranks, options.steps)
    else:
        for ranks in options.ranks or [8, 64, 512, 4096]:
            results[f"{ranks} ranks"] = cluster(ranks)
    columns = ["", *next(iter(results.values()))]
    rows = [(name, *(f"{n:.2f}" for n in row.values())) for name, row in results.items()]
    show(f"Ranks: {options.what}", columns, rows)
    finish(f"ranks_{options.what}", options, environment("cpu"), results)


if __name__ == "__main__":
    main()
