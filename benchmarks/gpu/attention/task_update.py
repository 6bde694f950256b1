"""What task update costs the host: 32 layers of two attention kernels, in one graph.

    python3 -m benchmarks.gpu.attention.task_update --json task_update.json

Host microseconds of a step, enqueued with the device idle: through the runner with the graph that
plans its spans itself ("device", no updates), and with tasks whose arguments are unchanged, equal,
remembered, new for one representative layer, and new for every layer.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.common import arguments, environment, finish, show
from benchmarks.gpu.attention.paged import SHAPES, Paged
from graphrt import UNCHANGED, Batch, GraphRunner, InputSpec
from graphrt.attention import TritonAttention, supports_of
from graphrt.cuda.update import siblings

LAYERS, KERNELS = 32, 64
MAX_CONTEXT = 65_536


def runner_of(problem: Paged, backend: TritonAttention) -> GraphRunner:
    reqs, shape = len(problem.lengths), problem.shape

    def forward(
        query: torch.Tensor, block_table: torch.Tensor, context_lens: torch.Tensor
    ) -> torch.Tensor:
        step = backend.begin(block_table, context_lens)
        for layer in range(LAYERS):
            backend.attend(step, query, *problem.caches(layer), out=problem.outs[layer])
        return problem.outs[-1]

    columns = problem.step.block_table.shape[1]
    runner = GraphRunner(
        forward,
        mode="FULL_DECODE_ONLY",
        sizes=[reqs],
        max_num_reqs=reqs,
        max_num_tokens=reqs,
        inputs={
            "query": InputSpec(torch.bfloat16, ("tokens", shape.num_heads, shape.query_dim)),
            "block_table": InputSpec(torch.int32, ("reqs", columns), pad=0, index=True),
            "context_lens": InputSpec(torch.int32, ("reqs",), pad=0),
        },
        attention=supports_of(backend),
    )
    runner.capture()
    return runner


def host_us(step: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times)


def measure(problem: Paged) -> dict[str, float]:
    reqs = len(problem.lengths)
    inputs = {
        "query": problem.query,
        "block_table": problem.step.block_table,
        "context_lens": problem.step.context_lens,
    }
    batch = Batch(reqs, reqs, query_len=1)

    def backend(splits: Any) -> TritonAttention:
        return TritonAttention(
            problem.shape, max_num_reqs=reqs, splits=splits, max_context=MAX_CONTEXT
        )

    planned = runner_of(problem, backend("device"))
    found = {"device": host_us(lambda: planned(batch, **inputs), 300)}
    planned.close()
    runner = runner_of(problem, backend("task"))

    def step(updates: Any) -> None:
        runner(batch, updates=updates, **inputs)

    def with_splits(numbers: Iterator[int]) -> Callable[[], None]:
        return lambda: step({"attention": {"num_splits": next(numbers)}})

    for number in range(2, 12):
        step({"attention": {"num_splits": number}})
    found["unchanged"] = host_us(lambda: step(UNCHANGED), 300)
    found["equal"] = host_us(lambda: step({"attention": {"num_splits": 11}}), 300)
    found["remembered"] = host_us(with_splits(itertools.cycle(range(2, 12))), 300)
    found["representative"] = host_us(with_splits(itertools.count(12)), 100)
    figures = runner.report().updates
    assert figures is not None and figures.self_check_failures == 0
    runner.close()
    # Never enough sets to compare, so that every layer is issued.
    checks, siblings.CHECKS = siblings.CHECKS, 1 << 30
    runner = runner_of(problem, backend("task"))
    found["every layer"] = host_us(with_splits(itertools.count(2)), 40)
    siblings.CHECKS = checks
    runner.close()
    return found


def main() -> None:
    args = arguments(__doc__).parse_args()
    results: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        problem = Paged(shape, [600, 300], layers=LAYERS, max_context=MAX_CONTEXT)
        problem.outs = [torch.empty_like(problem.out) for _ in range(LAYERS)]
        results[name] = found = measure(problem)
        show(
            f"{name}: host us, {LAYERS} layers of two kernels",
            ["step", "in all", "above unchanged", "a layer", "a node"],
            [
                [kind, us, over, over / LAYERS, over / KERNELS]
                for kind, us in found.items()
                for over in [us - found["unchanged"]]
            ],
        )
    finish("task_update", args, environment("cuda"), results)


if __name__ == "__main__":
    main()
