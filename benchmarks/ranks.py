"""What a vote of ranks costs a step, and what agreement costs a cluster in padding.

    python3 -m benchmarks.ranks vote [--ranks 2] [--steps 2000] [--json FILE]
    python3 -m benchmarks.ranks cluster [--ranks 8 64 512 4096] [--json FILE]

`vote` starts ranks as processes of this machine over gloo and measures, in microseconds: a gloo
all-reduce of as many bytes by itself; a vote waited for at once; a vote begun before a step of
some work and waited for after it; and vLLM's rule as it is published, one all-reduce of seven
int32 a rank. `cluster` draws batches for many ranks, and compares what they compute: each by
itself, by a vote on the graph, as here, and by vLLM's rule (the most tokens of any rank, one mode
for all; query lengths that differ make every rank run the general graph). Milliseconds of a step
are those that a Llama of 1B shape took on an H200 (`results/gpu_decode_1b_h200.json`), between its
sizes and above them by a straight line; a step of all ranks takes as long as its slowest one, and
the exchange itself, which runs beside the step before, is not in it.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import arguments, environment, finish, show
from graphrt import Batch, BatchDescriptor, GraphDispatcher, GraphMode
from graphrt.ranks import Agreement
from graphrt.ranks.ballot import BYTES, USABLE, Ballot

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


@dataclass(frozen=True)
class Traffic:
    """How batches of many ranks are drawn: decode steps of about 32 requests a rank."""

    spread: float = 0.0
    """Of the logarithms of the ranks' mean loads."""
    drafting: float = 0.0
    """The share of ranks that draft, with a query length of 4."""
    prompts: float = 0.0
    """The share of batches that have a prompt of 256 tokens beside."""
    lost: int = 0
    """Ranks that have lost the decode graphs of 40 to 64 tokens, for memory or in quarantine."""


TRAFFIC = {
    "even loads": Traffic(),
    "uneven loads": Traffic(spread=0.8),
    "one rank in 20 drafts": Traffic(drafting=0.05),
    "one batch in 1,000 has a prompt": Traffic(prompts=0.001),
    "one rank has lost four graphs": Traffic(lost=1),
}


MEASURED = Path(__file__).with_name("results") / "gpu_decode_1b_h200.json"
WAYS = {
    GraphMode.FULL: "graphrt FULL",
    GraphMode.PIECEWISE: "graphrt PIECEWISE",
    GraphMode.NONE: "eager",
}


class StepTimes:
    """Milliseconds of a step by its mode and tokens, as measured."""

    def __init__(self, path: Path = MEASURED) -> None:
        batches = json.loads(path.read_text(encoding="utf-8"))["results"]["1b"]["batches"]
        self._points = {
            mode: sorted((int(size), row["ms"][way]["step"]) for size, row in batches.items())
            for mode, way in WAYS.items()
        }
        self._known: dict[tuple[GraphMode, int], float] = {}

    def ms(self, mode: GraphMode, tokens: int) -> float:
        """Between two sizes, or above the largest, on the line through the nearest two."""
        known = self._known.get((mode, tokens))
        if known is None:
            points = self._points[mode]
            above = next((at for at, point in enumerate(points) if point[0] >= tokens), len(points))
            (left, low), (right, high) = points[max(0, min(above, len(points) - 1) - 1) :][:2]
            line = low + (tokens - left) * (high - low) / (right - left)
            known = self._known[mode, tokens] = max(line, points[0][1])
        return known


def drawn(rng: random.Random, traffic: Traffic, mean: float, query_len: int) -> Batch:
    reqs = max(1, min(round(rng.gauss(mean, mean**0.5)), 512 // query_len))
    if rng.random() < traffic.prompts:
        return Batch(min(reqs + 256, 512), reqs)
    return Batch(reqs * query_len, reqs, query_len)


def cluster(ranks: int, traffic: Traffic, *, steps: int = 200, seed: int = 0) -> dict[str, float]:
    """Of random steps of so many ranks: tokens computed for each live one, milliseconds a step, the
    share of steps with a FULL graph for all, and by vLLM's rule that of steps in which ranks take
    different graphs. `slowest alone` is a step without agreement, for ranks that wait anyway."""
    rng = random.Random(seed)
    whole, less = dispatcher_of(), dispatcher_of()
    for size in (40, 48, 56, 64):
        less.withdraw("FULL", BatchDescriptor(size, size, True, query_len=1))
    ballots = [Ballot(less if rank < traffic.lost else whole, {}) for rank in (0, ranks - 1)]
    means = [min(32 * rng.lognormvariate(0.0, traffic.spread), 400) for _ in range(ranks)]
    lens = [4 if rank / ranks < traffic.drafting else 1 for rank in range(ranks)]
    live = alone = ours = theirs = full = theirs_full = apart = 0
    times = StepTimes()
    alone_ms = ours_ms = theirs_ms = 0.0
    for _ in range(steps):
        batches = [drawn(rng, traffic, *each) for each in zip(means, lens, strict=True)]
        first, others = batches[0], set(batches[1:])
        tokens = sum(batch.num_tokens for batch in batches)
        live += tokens
        answers = [whole.peek(batch) for batch in batches]
        alone += sum(answer.descriptor.num_tokens for answer in answers)
        alone_ms += max(times.ms(each.mode, each.descriptor.num_tokens) for each in answers)
        votes = [ballots[0].usable(first), *map(ballots[1].usable, others)]
        least = [min(column) for column in zip(*votes, strict=True)]
        at = next((at for at, vote in enumerate(least) if vote == USABLE), None)
        graph = None if at is None else ballots[0].graphs[at]
        ours += tokens if graph is None else graph.descriptor.num_tokens * ranks
        full += graph is not None and graph.mode is GraphMode.FULL
        if graph is None:
            ours_ms += max(times.ms(GraphMode.NONE, batch.num_tokens) for batch in batches)
        else:
            ours_ms += times.ms(graph.mode, graph.descriptor.num_tokens)
        query_lens = {batch.query_len for batch in batches}
        query_len = query_lens.pop() if len(query_lens) == 1 else None
        most = Batch(max(batch.num_tokens for batch in batches), None, query_len)
        answers = [ballots[0].dispatcher.peek(most), ballots[1].dispatcher.peek(most)]
        if answers[0][:2] != answers[1][:2]:
            apart += 1
        theirs += answers[1].descriptor.num_tokens * ranks
        theirs_full += answers[1].mode is GraphMode.FULL
        theirs_ms += max(times.ms(each.mode, each.descriptor.num_tokens) for each in answers)
    return {
        "each alone": alone / live,
        "by votes": ours / live,
        "by vLLM's rule": theirs / live,
        "ms, slowest alone": alone_ms / steps,
        "ms by votes": ours_ms / steps,
        "ms by vLLM's rule": theirs_ms / steps,
        "FULL by votes": full / steps,
        "FULL by vLLM's rule": theirs_full / steps,
        "apart by vLLM's rule": apart / steps,
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
        for name, traffic in TRAFFIC.items():
            for ranks in options.ranks or [8, 64, 512, 4096]:
                results[f"{name}, {ranks} ranks"] = cluster(ranks, traffic)
    columns = ["", *next(iter(results.values()))]
    rows = [(name, *(f"{n:.2f}" for n in row.values())) for name, row in results.items()]
    show(f"Ranks: {options.what}", columns, rows)
    finish(f"ranks_{options.what}", options, environment("cpu"), results)


if __name__ == "__main__":
    main()
