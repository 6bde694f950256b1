"""What task update costs the host: 32 layers of two attention kernels, in one graph.

    python3 -m benchmarks.gpu.attention.task_update --json task_update.json

Host microseconds of a step, enqueued with the device idle: through the runner with the graph that
schedules its spans itself ("device", no updates), and with tasks whose arguments are unchanged,
equal, remembered, new for one representative layer, and new for every layer.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.common import arguments, environment, finish, show
from benchmarks.gpu.attention.paged import SHAPES, Paged, decode_runner
from graphrt import UNCHANGED, Batch
from graphrt.attention import TritonAttention
from graphrt.cuda.update import siblings

LAYERS, KERNELS = 32, 64
MAX_CONTEXT = 65_536


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

    by_device = decode_runner(problem, backend("device"), LAYERS)
    found = {"device": host_us(lambda: by_device(batch, **inputs), 300)}
    by_device.close()
    runner = decode_runner(problem, backend("task"), LAYERS)

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
    figures = runner.pool.update_figures()
    assert figures is not None and figures.self_check_failures == 0
    runner.close()
    # Never enough sets to compare, so that every layer is issued.
    checks, siblings.CHECKS = siblings.CHECKS, 1 << 30
    runner = decode_runner(problem, backend("task"), LAYERS)
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
